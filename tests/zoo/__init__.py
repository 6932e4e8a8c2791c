"""Small real models with training heads, and batches for them."""

from __future__ import annotations

from tests.zoo.decoders import DECODERS
from tests.zoo.encoders import ENCODERS
from tests.zoo.entry import Entry as Entry
from tests.zoo.entry import Mask as Mask
from tests.zoo.perception import PERCEPTION
from tests.zoo.plain import PLAIN
from tests.zoo.sequence_to_sequence import SEQUENCE_TO_SEQUENCE

ZOO: dict[str, Entry] = {
    entry.name: entry for entry in (*ENCODERS, *DECODERS, *SEQUENCE_TO_SEQUENCE, *PERCEPTION, *PLAIN)
}
BAR = tuple(name for name, entry in ZOO.items() if entry.bar)
"""The architectures that must be bit-equal; the others are expected to work too."""
