"""The suites of `outrider bench`: one package each."""
