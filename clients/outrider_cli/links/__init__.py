"""Links that are as slow as real ones: a TCP proxy for every user, and a network of packets for root.

`direction` computes when bytes that enter one direction of a link come out. `delay_proxy` applies that to TCP
connections, `wan` to packets between two network namespaces. `control` reads and changes a running link from another
process.
"""
