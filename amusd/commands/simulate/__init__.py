"""`amusd simulate`: which schedule would win, and by how much, on a machine that need not be there.

Plain decoding, synchronous blocks and windows of each length, chain and branching with each wait, and `auto`, on the
same answers, one at a time or several together. The real workers run on virtual time: no model,
no process, no wait.
"""
