"""`outrider bench`: how fast each method is, on this machine, beside what the machine could do.

prompts      what is continued
config       what was asked for: every flag, checked
contenders   who takes part: our methods and the baselines, each with its setting
samples      what one generation looked like to its client
drivers      how a contender generates: over gRPC, or in a worker process
servers      the services under test, each a process of its own
workload     who runs when: interleaved, in rotating order
statistics   samples to rows
machine      what one forward costs, and the ceiling that this sets
environment  where it ran
report       rows to tables
files        what is left behind: results.json, the report, pictures
plots        rows to pictures
command      the command itself

`outrider bench --suite datastore` measures the retrieval-datastore instead: the package `datastore` says what.
`outrider bench --suite methods` puts all methods beside what their papers claim: the package `methods` says how.
"""
