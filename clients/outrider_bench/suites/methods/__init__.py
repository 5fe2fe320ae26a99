"""`outrider bench --suite methods`: all methods on the demo pair, and what each paper claims for its own.

suite        what is measured, in which order, and what is left behind
plan         experiments, and how much of everything
parts        the experiments of each part: who takes part, and where
estimate     how long it will take
running      one experiment: warm-up, turns, contenders that are refused
replay       the requests of a service that is used: the workload of spacelike
prior        the prior of double: built by the target, checked against the prompts that are measured
provenance   whether the prompts were in the training text
measured     blocks to ratios and rates
claims       a measurement beside what it should be; asked, what is asked of each part
peers        another program on another machine, by its ratio to plain decoding
tables       experiments to tables; report, the report; plots, curves and drawing, the pictures
"""
