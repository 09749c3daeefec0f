"""`python -m tests.operators [WORD]`: how many operators there are of each sort; with a word, the names of those sorts
that contain it, such as `missing`."""

import sys
from collections import Counter

from tests.operators import schemas, sort

sorts = {name: sort(name) for name in schemas()}
for what, count in Counter(sorts.values()).most_common():
    print(f"{count:5}  {what}")
print(f"{len(sorts):5}  together")
for word in sys.argv[1:]:
    print(*(f"{name}  {what}" for name, what in sorted(sorts.items()) if word in what), sep="\n")
