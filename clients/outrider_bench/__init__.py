"""`outrider bench`: how fast each method is, on this machine, beside what the machine could do.

app               the subcommands, their flags
config            what the flags come to, checked
suite             the base of all suites: run, interrupt, results, write
result            a measurement beside its target
report, plotting  one table, one report, one layer of pictures
experiment        contenders that take turns on the same prompts; running runs it
drivers           the services under test, and how a contender generates on them
samples           one generation as its client saw it; statistics and measured make rows and ratios of it
environment       the machine, and what one forward costs on it
datastore_streams the datastore's streams, for suites that use one
simulation        a session in virtual time: what a perfect draft would bring over a network
workers           processes that a benchmark talks to
suites            one package a subcommand: experiments, claims, figures, report, suite
"""
