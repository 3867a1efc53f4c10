"""Take what is imported so far out of garbage collection, in the server that worlds are forked from.

Else each rank would look at all of it, half a million objects, at each start of a trainer, and copy the pages
that it shares with the server: a second of processor time a rank.
"""

import gc

gc.collect()
gc.freeze()
