"""What is left of the methods over a network: `outrider bench --suite network`.

`parts` says who takes part; `round_trips` lets round trips take turns behind one proxy, and `traffic` counts bytes at
it; `bound` works out what could be kept, in simulated time; `wan` puts the speculator behind a lossy network of real
packets, and `edge` a whole application. `asked` holds all that against what it should be; `report` writes it down.
"""
