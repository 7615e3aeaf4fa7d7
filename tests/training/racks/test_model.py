"""What a rack computes, cut out of a whole model, and the whole put together again; in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from surgeon.language.program import Program
from surgeon.models.edit import edit, program_of
from surgeon.training.racks.model import (
    RackModel,
    SilentEmbedding,
    assemble,
    open_rack,
    rack_of,
    save_rack,
)
from surgeon.training.racks.partition import Racks
from tests.tiny_models import DENSE_FAMILIES, tiny_model
from tests.training.racks.reference import forward

FAMILIES = sorted(DENSE_FAMILIES)
IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(3))
RANGES = ["0:2", "2:4"]
EDITED = {
    "pairs": "[A0 A1] [F0 F1] [A2 A3] [F2 F3]",
    "ladder": "A0 F0 >A1 >F1 A2 F2 >A3 >F3",
    "average": "A0~A1 F0~F1 A2 F2 A3 F3",
    "tracks": "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A1 F1 {A2/2:0 F2/2:0 | A2/2:1 F2/2:1} {A3/2:0 F3/2:0 | A3/2:1 F3/2:1}",
    "ranks": "A0@q4 F0 A1 F1@down8 A2 F2 A3@o6 F3",
    "pruned": "A0 F1 A2 F2 F3",
}


def racks_of(whole: PreTrainedModel, depth: int = 1) -> tuple[Racks, list[RackModel]]:
    racks = Racks.parse(RANGES, program_of(whole), depth)
    return racks, [rack_of(whole, racks, index) for index in range(len(racks))]


def stretch_by_stretch(racks: list[RackModel], ids: Tensor = IDS) -> list[tuple[Tensor, Tensor]]:
    found: list[tuple[Tensor, Tensor]] = []
    for rack in racks:
        found.append(forward(rack, ids, found[-1][0] if found else None))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_racks_one_after_the_other_are_the_model(family: str, tied: bool) -> None:
    whole = tiny_model(family, 4, tie_word_embeddings=tied).double()
    expected = whole(input_ids=IDS).logits
    racks, cut = racks_of(whole)
    last = stretch_by_stretch(cut)[-1][1]
    # Whose attentions compute in float32 whatever they get.
    digits = 1e-5 if family in ("gpt_neo", "gptj") else 1e-10
    assert torch.allclose(last, expected, atol=digits)
    path = assemble(whole, racks, cut)
    assert torch.allclose(path(input_ids=IDS).logits, expected, atol=digits)
    assert torch.equal(whole(input_ids=IDS).logits, expected)  # which is left as it is
    assert not path.config.tie_word_embeddings


@pytest.mark.parametrize("name", EDITED)
def test_racks_of_edited_models(name: str) -> None:
    whole = edit(tiny_model("llama", 4).double(), EDITED[name])
    racks, cut = racks_of(whole, depth=2 if name in ("pairs", "ladder") else 1)
    expected = whole(input_ids=IDS).logits
    assert torch.allclose(stretch_by_stretch(cut)[-1][1], expected, atol=1e-10)
    path = assemble(whole, racks, cut)
    assert torch.allclose(path(input_ids=IDS).logits, expected, atol=1e-10)


def test_a_coda_is_the_end_of_the_model() -> None:
    """The first rack's prediction, against the model with the layers between left out."""
    for program, short in (
        ("A0 F0 A1 F1 A2 F2 A3 F3", "A0 F0 A1 F1 A3 F3"),
        (EDITED["pairs"], EDITED["pairs"]),
    ):
        whole = edit(tiny_model("gpt2", 4).double(), program)
        _, cut = racks_of(whole, depth=2 if "[" in program else 1)
        found = stretch_by_stretch(cut)[0][1]
        assert torch.allclose(found, edit(whole, short)(input_ids=IDS).logits, atol=1e-10)


def test_a_coda_of_no_layers_is_norm_and_head() -> None:
    whole = tiny_model("gemma2", 4).double()
    _, cut = racks_of(whole, depth=0)
    found = stretch_by_stretch(cut)[0][1]
    assert torch.allclose(found, edit(whole, "A0 F0 A1 F1")(input_ids=IDS).logits, atol=1e-10)


def loss_of(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


class Plain(nn.Module):
    """The racks in one computation of `transformers`' own layers, with nothing of surgeon: streams are detached."""

    def __init__(self, model: Any, coda: Any) -> None:
        super().__init__()
        self.model, self.coda = model, coda

    def losses(self) -> list[Tensor]:
        inner = self.model.model
        stream = inner.embed_tokens(IDS)
        positions = inner.rotary_emb(stream, torch.arange(IDS.shape[1])[None])
        found = []
        for part, end in ((inner.layers[:2], self.coda), (inner.layers[2:], None)):
            for layer in part:
                stream = layer(stream, position_embeddings=positions, attention_mask=None)
            ahead, norm, head = stream, inner.norm, self.model.lm_head
            if end is not None:
                for layer in end.model.layers[3:]:
                    ahead = layer(ahead, position_embeddings=positions, attention_mask=None)
                norm, head = end.model.norm, end.lm_head
            found.append(loss_of(head(norm(ahead))))
            stream = stream.detach()
        return found


def test_gradients_stay_within_the_rack() -> None:
    """Against autograd of the racks as one plain computation with its streams detached."""
    make = {"tie_word_embeddings": False}
    plain = Plain(tiny_model("llama", 4, **make).double(), tiny_model("llama", 4, **make).double())
    sum(plain.losses()).backward()
    wanted = {name: one.grad for name, one in plain.model.named_parameters()}
    coda = {name: one.grad for name, one in plain.coda.named_parameters()}
    _, cut = racks_of(tiny_model("llama", 4, **make).double())
    stream = None
    for rack, expected in zip(cut, plain.losses(), strict=True):
        stream, logits = forward(rack, IDS, stream)
        assert not stream.requires_grad
        assert loss_of(logits).item() == pytest.approx(expected.item(), abs=1e-12)
        loss_of(logits).backward()
    first, last = (dict(rack.model.named_parameters()) for rack in cut)
    moved = {f"model.layers.{own + 2}": f"model.layers.{own}" for own in range(2)}
    for name, parameter in first.items():
        if name.startswith("model.layers.2."):
            expected = coda[name.replace("layers.2.", "layers.3.")]
        elif name.startswith(("model.norm", "lm_head")):
            expected = coda[name]
        else:
            expected = wanted[name]
        assert torch.allclose(parameter.grad, expected, atol=1e-12), name
    for whole_name, gradient in wanted.items():
        place = ".".join(whole_name.split(".")[:3])
        if place in moved or whole_name.startswith(("model.norm", "lm_head")):
            own_name = whole_name.replace(place, moved.get(place, place))
            assert torch.allclose(last[own_name].grad, gradient, atol=1e-12), whole_name


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_rack_holds_nothing_of_the_others(family: str) -> None:
    whole = tiny_model(family, 4)
    _, (first, last) = racks_of(whole)
    layer = sum(one.numel() for one in whole.get_submodule(first.layers.family.layers)[0].parameters())
    output = sum(
        one.numel()
        for path in (first.layers.family.final_norm, first.layers.family.head)
        for one in whole.get_submodule(path).parameters()
    )
    assert sum(one.numel() for one in last.model.parameters()) == 2 * layer + output
    embeddings = [whole.get_submodule(first.layers.family.embedding)]
    if not first.layers.family.positions.rotary:
        embeddings.append(whole.get_submodule(first.layers.family.embeddings[-1]))
    begins = sum(one.numel() for module in embeddings for one in module.parameters())
    assert sum(one.numel() for one in first.model.parameters()) == 3 * layer + output + begins
    assert any(isinstance(module, SilentEmbedding) for module in last.model.modules())
    own = {one.data_ptr() for one in whole.parameters()}
    assert not own & {one.data_ptr() for rack in (first, last) for one in rack.model.parameters()}


def test_random_codas_differ_and_come_again() -> None:
    whole = tiny_model("llama", 6, tie_word_embeddings=False)
    racks = Racks.parse("0:2,2:4,4:6", Program.dense(6), 1)
    state = torch.get_rng_state()
    first, again, second, last = (rack_of(whole, racks, index, seed=7) for index in (0, 0, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    codas = [rack.coda_parameters() for rack in (first, again, second, last)]
    for value, same, other in zip(*codas[:3], strict=True):
        assert torch.equal(value, same)
        assert value.dim() == 1 or not torch.equal(value, other)
    wanted = [*whole.model.layers[5].parameters(), whole.model.norm.weight, whole.lm_head.weight]
    assert all(map(torch.equal, codas[3], wanted))
    coda: Any = first.model.get_submodule("model.layers.2")
    assert coda.mlp.down_proj.weight.std().item() == pytest.approx(
        whole.config.initializer_range, rel=0.2
    )
    tied = rack_of(tiny_model("llama", 6, tie_word_embeddings=True), racks, 1, seed=7)
    assert torch.equal(
        tied.model.lm_head.weight, tiny_model("llama", 6, tie_word_embeddings=True).lm_head.weight
    )


@pytest.mark.parametrize("name", EDITED)
def test_codas_have_the_same_order_in_every_rack(name: str) -> None:
    _, (first, last) = racks_of(edit(tiny_model("llama", 4), EDITED[name]), depth=2)
    one, other = first.coda_parameters(), last.coda_parameters()
    assert all(map(torch.equal, one, other))
    assert len(one) == len(other) > 2


@pytest.mark.parametrize("program", [EDITED["tracks"], EDITED["ranks"], EDITED["average"]])
def test_a_rack_as_a_file(program: str, tmp_path: Path) -> None:
    """After its numbers have changed, those of slices, too."""
    _, cut = racks_of(edit(tiny_model("qwen2", 4), program))
    for rack in cut:
        with torch.no_grad():
            for number, parameter in enumerate(rack.model.parameters()):
                parameter.add_(0.1 + 0.01 * number)
        save_rack(rack, tmp_path / f"{rack.index}")
    opened = [open_rack(tmp_path / f"{rack.index}") for rack in cut]
    assert [rack.index for rack in opened] == [0, 1]
    assert opened[0].racks == cut[0].racks
    for found, expected in zip(stretch_by_stretch(opened), stretch_by_stretch(cut), strict=True):
        assert all(map(torch.equal, found, expected))
    (tmp_path / "0").write_bytes(b"no")
    with pytest.raises(ValueError, match="0 is"):
        open_rack(tmp_path / "0")


def test_what_cannot_be() -> None:
    _, (first, last) = racks_of(tiny_model("llama", 4))
    with pytest.raises(ValueError, match="needs the stream of the one before"):
        forward(last, IDS)
    with pytest.raises(
        ValueError, match=r"comes in is \(2, 4, 32\), and the tokens make it \(2, 9, 32\)"
    ):
        forward(last, IDS, torch.zeros(2, 4, 32))
    with pytest.raises(ValueError, match="last rack has no coda of its own"):
        last.coda()
    whole = tiny_model("opt", 4, word_embed_proj_dim=16)
    with pytest.raises(ValueError, match=r"project_(in|out).* lies outside the layers"):
        rack_of(whole, first.racks, 0)
    with pytest.raises(ValueError, match="does not run the recipe's program"):
        rack_of(tiny_model("llama", 5), first.racks, 0)
