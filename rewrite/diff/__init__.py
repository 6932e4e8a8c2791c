"""What a rewrite changes in a model, line by line, with the bytes each change saves."""

from rewrite.diff.model import GraphDiff as GraphDiff
from rewrite.diff.model import Hunk as Hunk
from rewrite.diff.model import NodeLine as NodeLine
from rewrite.diff.model import PassRecord as PassRecord
