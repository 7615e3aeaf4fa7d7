"""What a search may spend: written as depth=12 on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from surgeon.errors import did_you_mean

QUANTITIES = ("depth",)


@dataclass(frozen=True)
class Budget:
    """The effective depth to come down to, in layers of the unedited model."""

    depth: int

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read a budget such as "depth=12".

        Raises:
            ValueError: if the quantity is unknown or the value is no whole number above 0.
        """
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"budget {text!r} should be a quantity and a value, as in depth=12")
        if name not in QUANTITIES:
            raise ValueError(f"unknown budget {name!r}; {did_you_mean(name, QUANTITIES)}")
        if not value.isdecimal() or int(value) == 0:
            raise ValueError(f"budget depth={value} should be a whole number of layers, at least 1")
        return cls(int(value))

    def pairs_needed(self, num_layers: int) -> int:
        """How many LP pairs bring a model of this many layers to the budget: each saves one layer of depth.

        Raises:
            ValueError: if the budget is deeper than the model, or not reachable by pairs.
        """
        if self.depth > num_layers:
            raise ValueError(
                f"budget depth={self.depth} is more than the model's {num_layers} layers; use at most {num_layers}"
            )
        pairs = num_layers - self.depth
        if 2 * pairs > num_layers:
            least = num_layers - num_layers // 2
            raise ValueError(
                f"budget depth={self.depth} is out of reach: pairs bring {num_layers} layers to {least} at the least"
            )
        return pairs
