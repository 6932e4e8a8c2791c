"""Which operators a model must keep in fp32 so that what it computes in half precision is near enough."""

from rewrite.bisect.kept import bisect as bisect
from rewrite.bisect.result import Bisection as Bisection
