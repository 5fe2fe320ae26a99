"""Links that are as slow as real ones: a TCP proxy for anybody, and a network of packets for those who are root.

`line` says when what enters one direction of a link comes out; `proxy` does that to TCP connections, `wan` to packets
between two network namespaces. `control` is how the process of a link is asked and told.
"""
