"""How often a router's process looks for garbage that refers to itself.

A request makes some hundred objects that all go with it, and no cycles: Python's own rate of a look
after every 700 new ones is about a twelfth of the processor time that a request takes.
"""

import gc

YOUNG = 20_000  # objects between two looks: some megabytes, and a few hundred requests
LOOKS = (20, 100)  # of those, until one looks at the older and at the oldest too


def look_seldom() -> None:
    """From now on, and never at what is there already: modules, settings, tokenizers."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *LOOKS)
