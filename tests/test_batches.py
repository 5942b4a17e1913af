"""Batches: rows draft, accept and finish at their own pace; each is its solo run, and sampling keeps its law."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from calls import NEW, padded, plain, sequences, shapes_of_forwards, talon
from models import ScriptedDrafter, drafter_zoo, random_head, tiny_model
from oracles import chi_square, enumerate_law

pytestmark = pytest.mark.conformance

PROMPTS = [[7, 11, 3, 42, 5, 9, 23, 8, 14, 31, 6, 12, 19, 27, 44, 2, 36, 17], [5], [33, 4, 18, 21], [9, 9, 9, 30, 12]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", eos_token_id=None)


def solo(model: Any, prompt: list[int], **options: Any) -> list[int]:
    return plain(model, torch.tensor([prompt]), max_new_tokens=NEW, **options)[0].tolist()


def together(model: Any, prompts: list[list[int]], drafter: Any, **options: Any) -> Any:
    """Ours, for all prompts in one left-padded batch."""
    ids, mask = padded(prompts)
    options |= {"attention_mask": mask, "max_new_tokens": NEW, "return_dict_in_generate": True}
    return talon(model, ids, drafter, **options)


def assert_solo_texts(out: Any, prompts: list[list[int]], texts: list[list[int]]) -> None:
    """Every row says what its prompt says alone, and nothing but padding after it."""
    new = [text[len(prompt) :] for prompt, text in zip(prompts, texts, strict=True)]
    longest = max(map(len, new))
    said = out.sequences[:, max(map(len, prompts)) :].tolist()
    assert said == [tokens + [0] * (longest - len(tokens)) for tokens in new]


def finishing_apart(model: Any) -> tuple[list[int], list[list[int]]]:
    """End tokens under which the rows finish apart, and the texts of the rows under them."""
    texts = [solo(model, prompt) for prompt in PROMPTS]
    ends = [texts[0][len(PROMPTS[0]) + 4], texts[1][len(PROMPTS[1]) + 9]]
    texts = [solo(model, prompt, eos_token_id=ends) for prompt in PROMPTS]
    lengths = {len(text) - len(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)}
    assert len(lengths) > 2, "the rows finish together, so nothing is tested"
    return ends, texts


@pytest.mark.parametrize("policy", ["talon", "eagle", "chain"])
def test_a_row_with_a_useless_drafter_beside_a_row_with_a_perfect_one(model: Any, policy: str) -> None:
    texts = [solo(model, prompt) for prompt in PROMPTS]
    zoo = drafter_zoo(texts, model)
    kinds = ["perfect", "adversarial", "nan", "good"]

    def guess(row: int, text: list[int]) -> torch.Tensor:
        return zoo[kinds[row]].guess(row, text)

    assert_solo_texts(together(model, PROMPTS, ScriptedDrafter(guess), talon_policy=policy), PROMPTS, texts)


def test_a_finished_row_leaves_the_batch_and_the_others_do_not_notice(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest row alone pays for the last rounds."""
    ends, texts = finishing_apart(model)
    lengths = [len(text) - len(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)]
    drafter = drafter_zoo(texts, model)["adversarial"]  # one token a row and round
    shapes = shapes_of_forwards(model, monkeypatch)
    assert_solo_texts(together(model, PROMPTS, drafter, eos_token_id=ends), PROMPTS, texts)
    assert [rows for rows, _ in shapes] == [sum(length > step for length in lengths) for step in range(max(lengths))]


def test_rows_leave_a_batch_whose_drafter_has_no_depth_left(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No round is drafted, so what the drafter has not read piles up while the rows become fewer."""
    ends, texts = finishing_apart(model)
    monkeypatch.setattr("models.ScriptedSession.max_depth", 0)
    out = together(model, PROMPTS, drafter_zoo(texts, model)["perfect"], eos_token_id=ends)
    assert out.talon_stats.draft_steps == 0
    assert_solo_texts(out, PROMPTS, texts)


def test_sixteen_rows_of_sixty_nodes(model: Any) -> None:
    prompts = [[3 + (row * 7 + step * 5) % 47 for step in range(1 + row % 9)] for row in range(16)]
    texts = [solo(model, prompt) for prompt in prompts]
    for drafter in (random_head(model, seed=3), drafter_zoo(texts, model)["good"]):
        assert_solo_texts(together(model, prompts, drafter, talon_node_budget=60), prompts, texts)


def test_return_sequences_of_a_greedy_call_are_equal(model: Any) -> None:
    want = solo(model, PROMPTS[2])
    assert sequences(together(model, [PROMPTS[2]] * 2, random_head(model, seed=3))) == [want, want]


@pytest.mark.parametrize("prompts", [[PROMPTS[2]], [PROMPTS[2], PROMPTS[3]]])
def test_return_sequences_ask_a_prefix_function_with_plain_generates_numbers(
    model: Any, prompts: list[list[int]]
) -> None:
    ids, mask = padded(prompts)
    asked: dict[str, list[tuple[int, tuple[int, ...]]]] = {"plain": [], "talon": []}

    def rule(who: str) -> Any:
        def allowed(number: int, prefix: torch.Tensor) -> list[int]:
            asked[who].append((number, tuple(prefix.tolist())))
            return [(int(prefix.sum()) + 5 * number) % 50]

        return allowed

    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": True, "num_return_sequences": 2}
    want = plain(model, ids, prefix_allowed_tokens_fn=rule("plain"), **options)
    got = talon(model, ids, random_head(model, seed=3), prefix_allowed_tokens_fn=rule("talon"), **options)
    assert got.tolist() == want.tolist()
    assert sorted(asked["talon"]) == sorted(asked["plain"])


SMALL = {"vocab_size": 6, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0, "num_hidden_layers": 7}


@pytest.mark.parametrize("acceptance", [pytest.param("match", marks=pytest.mark.slow), "residual"])
def test_return_sequences_of_a_sampled_call_have_plain_generates_law(acceptance: str) -> None:
    """Chi-square of 3-token texts against the law enumerated from the model's own logits (alpha 1e-4)."""
    model = tiny_model("llama", **SMALL)
    prompt, count = torch.tensor([[3, 5, 1, 4]]), 4000

    def table(path: tuple[int, ...]) -> list[float]:
        ids = torch.tensor([[*prompt[0].tolist(), *path]])
        with torch.no_grad():
            return (model(input_ids=ids).logits[0, -1] / 0.8).log_softmax(-1).tolist()

    law = enumerate_law(table, 3)
    out = talon(
        model,
        prompt,
        random_head(model, seed=3, draft_vocabulary=6),
        num_return_sequences=count,
        do_sample=True,
        temperature=0.8,
        top_k=0,
        max_new_tokens=3,
        talon_node_budget=7,
        talon_top_k=3,
        talon_acceptance=acceptance,
    )
    counts = Counter(tuple(row) for row in out[:, prompt.shape[1] :].tolist())
    assert chi_square(counts, law, count) > 1e-4
    uniform = {path: 1 / len(law) for path in law}
    assert chi_square(counts, uniform, count) < 1e-4, "the law is too flat to tell anything"
