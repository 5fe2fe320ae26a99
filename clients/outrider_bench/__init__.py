"""`outrider bench`: what Outrider does on this machine, and what the papers claim.

app               the subcommands and their flags
config            the flags' values, checked
suite             the base of all suites: run, interrupt, results, write
report            tables, and the report that they are part of
experiment        contenders that take turns on the same prompts; running runs it
drivers           the services under test, and how a contender generates on them
samples           one generation as its client saw it; statistics makes rows of many, bootstrap intervals
environment       the machine, and what one forward costs on it
workers           processes that a benchmark talks to
generate, papers, pair, serve, gpu: one package per subcommand
"""
