"""Items as bytes."""

from __future__ import annotations

import io

import pytest
import torch

from surgeon.training.racks.items import Item, ItemKey, ItemKind


def written(item: Item) -> bytes:
    file = io.BytesIO()
    item.write(file)
    return file.getvalue()


def read_back(data: bytes) -> Item:
    return Item.read(io.BytesIO(data))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (1, 2, 3, 2)])
def test_what_is_read_is_what_was_made(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    key = ItemKey(7, ItemKind.HELD_OUT, 3)
    item = Item.of(key, tensor)
    found = read_back(written(item))
    assert found == item
    assert item.nbytes == len(written(item)) < tensor.nbytes + 60
    assert found.tensor().dtype == dtype
    assert torch.equal(found.tensor(), tensor)


def test_the_numbers_are_a_copy() -> None:
    tensor = torch.randn(4, 3)
    item = Item.of(ItemKey(1, ItemKind.TRAINING), tensor.T)
    before = tensor.T.clone()
    tensor.zero_()
    assert torch.equal(item.tensor(), before)


def test_keys_have_the_order_in_which_a_rack_makes_them() -> None:
    made = [
        ItemKey(0, ItemKind.HELD_OUT, 0), ItemKey(0, ItemKind.HELD_OUT, 1), ItemKey(1, ItemKind.TRAINING, 0),
        ItemKey(1, ItemKind.TRAINING, 1), ItemKey(1, ItemKind.HELD_OUT, 0), ItemKey(2, ItemKind.TRAINING, 0),
    ]  # fmt: skip
    assert sorted(made, key=lambda key: (key.step, key.kind, key.place)) == made == sorted(made)


@pytest.mark.parametrize("place", [1, 24, -1])
def test_damage_is_noticed(place: int) -> None:
    """In the key, in the checksum, in the numbers."""
    damaged = bytearray(written(Item.of(ItemKey(1, ItemKind.TRAINING, 2), torch.randn(3))))
    damaged[place] ^= 1
    with pytest.raises(ValueError, match="step .* is damaged"):
        read_back(bytes(damaged)).tensor()


def test_what_is_no_item() -> None:
    data = written(Item.of(ItemKey(1, ItemKind.TRAINING, 2), torch.randn(3)))
    with pytest.raises(EOFError):
        read_back(data[:-1])
    with pytest.raises(ValueError, match="is not a valid ItemKind"):
        read_back(data[:8] + b"\x07" + data[9:])
    with pytest.raises(ValueError, match="no item"):
        read_back(data[:13] + b"\x07" + data[14:])


def test_numbers_that_are_not_sent() -> None:
    with pytest.raises(ValueError, match=r"torch\.int64, and racks exchange float32"):
        Item.of(ItemKey(1, ItemKind.TRAINING), torch.arange(3))
