"""Heads and targets whose vocabularies have other sizes, and targets whose embeddings are no plain table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calls import BATCH, BATCH_MASK, PROMPT, plain, talon
from heads import Forwards, head_config, head_tensors, random_commits, write_head
from models import VOCABULARY, random_head, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from talon_hf import EagleDraft, TalonConfig, generate

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "return_dict_in_generate": True}


def head_for(folder: Path, model: PreTrainedModel, drafted: list[int] | None = None, **changes: Any) -> EagleDraft:
    """A head whose `d2t` reaches the ids `drafted`; None drafts the head's whole vocabulary without one."""
    vocabulary = changes.get("vocab_size", VOCABULARY)
    config = head_config(model, draft_vocab_size=len(drafted) if drafted else vocabulary, **changes)
    tensors = head_tensors(config)
    if drafted:
        tensors["d2t"] = torch.tensor(drafted) - torch.arange(len(drafted))
    return EagleDraft.from_pretrained(write_head(folder, config, tensors))


def padded(rows: int, multiple: int, **changes: Any) -> PreTrainedModel:
    """A target whose embeddings are padded the way that transformers does it; the new rows may win."""
    model = tiny_model("llama", vocab_size=rows, eos_token_id=None, **changes)
    torch.manual_seed(1)
    model.resize_token_embeddings(rows, pad_to_multiple_of=multiple, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[rows:].normal_(0.0, 0.3)
        model.get_output_embeddings().weight[rows:].normal_(0.0, 0.3)
    return model


# Vocabularies --------------------------------------------------------------------------------------------------------


@pytest.mark.conformance
@pytest.mark.parametrize("multiple", [8, 32, 64, 100, 128])
@pytest.mark.parametrize("drafted", [None, [3, 7, 11, 42, 49]], ids=["whole", "d2t"])
def test_a_padded_target_takes_its_head(multiple: int, drafted: list[int] | None, tmp_path: Path) -> None:
    model = padded(VOCABULARY, multiple)
    head = head_for(tmp_path, model, drafted, vocab_size=VOCABULARY)
    assert model.config.vocab_size > head.config.vocab_size
    out = talon(model, PROMPT, head, **OPTIONS)
    assert out.sequences.tolist() == plain(model, PROMPT, max_new_tokens=24).tolist()
    assert out.talon_stats.draft_steps > 0


@pytest.mark.conformance
def test_ids_beyond_the_heads_own_embeddings_are_read_as_one_of_them(tmp_path: Path) -> None:
    """The target emits such ids, since its added rows may win; the head has no row for them."""
    model = padded(VOCABULARY, 128)
    head = head_for(tmp_path, model, hidden_size=16, target_hidden_size=32, vocab_size=VOCABULARY)
    assert head.embed_tokens.weight.shape == (VOCABULARY, 16)
    options = {"attention_mask": BATCH_MASK, "max_new_tokens": 24}
    out = talon(model, BATCH, head, **options)
    assert out.tolist() == plain(model, BATCH, **options).tolist()
    assert int(out.max()) >= VOCABULARY


@pytest.mark.conformance
def test_a_head_padded_more_than_its_target_fits_where_its_ids_do(tmp_path: Path) -> None:
    model = tiny_model("llama", eos_token_id=None)
    head = head_for(tmp_path, model, [3, 7, 11, 42, 49], vocab_size=64)
    out = talon(model, PROMPT, head, **OPTIONS)
    assert out.sequences.tolist() == plain(model, PROMPT, max_new_tokens=24).tolist()


@pytest.mark.parametrize(
    ("rows", "drafted", "vocabulary", "words"),
    [
        (50, [3, 7, 50], 64, "vocabulary of 64, the model's is 50: the head drafts ids up to 50 (its `d2t` maps one"),
        (50, None, 64, "vocabulary of 64, the model's is 50: the head drafts ids up to 63 (it has no `d2t`)"),
        (40, [3, 7, 40], 50, "vocabulary of 50, the model's is 40: the head drafts ids up to 40"),
        (150, [3, 7], 50, "vocabulary of 50, the model's is 150, more than padding adds"),
        (4000, [3, 7], 2000, "vocabulary of 2000, the model's is 4000, more than padding adds"),
    ],
)
def test_a_head_for_another_vocabulary_is_told_with_both_sizes(
    rows: int, drafted: list[int] | None, vocabulary: int, words: str, tmp_path: Path
) -> None:
    model = tiny_model("llama", vocab_size=rows)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    head = head_for(tmp_path, model, drafted, vocab_size=vocabulary)
    with pytest.raises(ValueError, match="Use the head that was trained for this model") as caught:
        generate(PROMPT, model=model, assistant_model=head, max_new_tokens=4)
    assert words in str(caught.value)


# Embeddings ----------------------------------------------------------------------------------------------------------


class Packed(nn.Embedding):
    """Codes of 8 bits, or two of 4 bits a byte, with a scale a row; the weight alone is no table."""

    def __init__(self, dense: nn.Embedding, bits: int) -> None:
        super().__init__(*dense.weight.shape)
        most = 2 ** (bits - 1) - 1
        self.bits = bits
        self.register_buffer("scale", dense.weight.detach().abs().amax(dim=1, keepdim=True) / most)
        codes = (dense.weight.detach() / self.scale).round().to(torch.int8)
        if bits == 4:
            codes = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        codes = self.weight[ids]
        if self.bits == 4:
            codes = torch.stack([(codes << 4) >> 4, codes >> 4], dim=-1).flatten(-2)
        return codes.to(self.scale.dtype) * self.scale[ids]


class Hidden(nn.Module):
    """Embeddings that no attribute shows: neither a weight nor a count of rows."""

    def __init__(self, dense: nn.Embedding) -> None:
        super().__init__()
        self.table = [dense.weight.detach()]

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[0][ids]


class Placeholder(nn.Embedding):
    """A weight of the right kind and shape that its forward does not use."""

    def __init__(self, dense: nn.Embedding) -> None:
        super().__init__(*dense.weight.shape, dtype=dense.weight.dtype)
        self.register_buffer("real", dense.weight.detach())

    def forward(self, ids: Tensor) -> Tensor:
        return self.real[ids]


@pytest.mark.conformance
@pytest.mark.parametrize(
    "wrap",
    [lambda dense: Packed(dense, 8), lambda dense: Packed(dense, 4), Hidden, Placeholder],
    ids=["8 bits", "4 bits", "no weight", "placeholder"],
)
def test_the_head_sees_the_embeddings_that_the_target_sees(wrap: Any, tmp_path: Path) -> None:
    model, dense = (tiny_model("llama", eos_token_id=None) for _ in range(2))
    module = wrap(model.get_input_embeddings())
    model.set_input_embeddings(module)
    with torch.no_grad():
        dense.get_input_embeddings().weight.copy_(module(torch.arange(VOCABULARY)))
    head = head_for(tmp_path, model)
    outputs = [talon(target, PROMPT, head, **OPTIONS) for target in (model, dense)]
    assert outputs[0].sequences.tolist() == plain(model, PROMPT, max_new_tokens=24).tolist()
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist()
    assert outputs[0].talon_stats.nodes == outputs[1].talon_stats.nodes
    forwards = Forwards().watch(head)
    commit = random_commits(head, rows=1, rounds=0)[0]
    head.open(model, rows=1).begin(commit)
    following = torch.cat([commit.tokens[0, 1:], commit.roots])
    assert torch.equal(forwards.embeds[0][0], dense.get_input_embeddings().weight[following])


@pytest.mark.conformance
def test_a_scale_inside_the_embedding_module_leaves_the_heads_drafts(tmp_path: Path) -> None:
    """Gemma 3 multiplies there by the root of its width; heads are trained on the plain weight."""
    model = tiny_model("gemma3")
    module = model.get_input_embeddings()
    table = nn.Embedding.from_pretrained(module.weight.detach())
    ids = torch.arange(VOCABULARY)
    assert torch.allclose(module(ids), table(ids) * 32**0.5, rtol=1e-3)
    head = head_for(tmp_path, model)
    commit = random_commits(head, rows=1, rounds=0)[0]
    called = head.open(model, rows=1).begin(commit)
    model.set_input_embeddings(table)
    torch.testing.assert_close(called, head.open(model, rows=1).begin(commit), rtol=0.0, atol=2e-3)


def test_embeddings_of_another_width_need_a_head_with_its_own(tmp_path: Path) -> None:
    model = tiny_model("llama")
    head = head_for(tmp_path / "without", model)
    own = head_for(tmp_path / "own", model, hidden_size=16, target_hidden_size=32)
    model.set_input_embeddings(nn.Embedding(VOCABULARY, 8))
    with pytest.raises(ValueError, match=r"in a width of 32, and theirs is 8.*embed_tokens\.weight"):
        head.features_of(model)
    assert own.features_of(model).boundaries == (2, 4, 5)


# Numbers of other libraries ------------------------------------------------------------------------------------------


@pytest.mark.conformance
def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    model = tiny_model("llama")
    head = random_head(model)
    budgets = [numpy.int64(7), numpy.uint8(7), numpy.int32(7)]
    want = talon(model, PROMPT, head, talon_node_budget=7, talon_mu=0.5, talon_max_depth=3, **OPTIONS)
    for budget, fraction in zip(budgets, [numpy.float64(0.5), numpy.float32(0.5), numpy.float16(0.5)], strict=True):
        config = TalonConfig(node_budget=budget, mu=fraction, max_depth=numpy.int16(3), policy=numpy.str_("talon"))
        assert config == TalonConfig(node_budget=7, mu=0.5, max_depth=3)
        assert [type(value) for value in (config.node_budget, config.mu, config.max_depth)] == [int, float, int]
        options = {"talon_node_budget": budget, "talon_mu": fraction, "talon_max_depth": numpy.int16(3)}
        out = talon(model, PROMPT, head, **{**OPTIONS, "max_new_tokens": numpy.int64(24)}, **options)
        assert out.sequences.tolist() == want.sequences.tolist()
        assert out.talon_stats.nodes == want.talon_stats.nodes
    for wrong in (numpy.bool_(True), numpy.float64(7.0), numpy.int64(1), numpy.nan):
        with pytest.raises(ValueError, match="`talon_node_budget` must be a whole number"):
            TalonConfig(node_budget=wrong)
    for wrong in (numpy.bool_(True), numpy.float64(0.0), numpy.float32("nan")):
        with pytest.raises(ValueError, match="`talon_mu` must be a number"):
            TalonConfig(mu=wrong)
