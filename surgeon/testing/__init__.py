"""Contracts of operations, families, forms and spaces, for pytest: subclass one, give fixtures, inherit its tests.

They hold for extensions as for surgeon's own; docs/extending.md shows each from beginning to end.
"""

try:
    import pytest
except ImportError as error:
    raise ImportError(
        "surgeon.testing needs pytest, which is not installed: pip install pytest"
    ) from error

# So that a failure shows what was compared, as in a test file.
pytest.register_assert_rewrite(
    "surgeon.testing.families",
    "surgeon.testing.forms",
    "surgeon.testing.operations",
    "surgeon.testing.spaces",
)

from surgeon.testing.families import FamilyContract  # noqa: E402
from surgeon.testing.forms import FormContract  # noqa: E402
from surgeon.testing.operations import OperationContract  # noqa: E402
from surgeon.testing.spaces import SpaceContract  # noqa: E402
from surgeon.testing.sublayers import Sublayers  # noqa: E402

__all__ = ["FamilyContract", "FormContract", "OperationContract", "SpaceContract", "Sublayers"]
