"""The decoding loop: prefill, then rounds of grow, score, walk, commit (TALON, Algorithm 1)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .acceptance import RULES, Verdict, walk
from .candidates import TalonCandidateGenerator
from .compat import pad_token
from .config import TalonConfig
from .drafter import Commit, Drafter
from .output import TalonOutput
from .pace import must_keep_step
from .positions import are_read_alike, refuse_crossing
from .probe import probe
from .prompt import Prompt, chunk_size, given_cache, refuse_lost_media
from .sampling import Picker
from .stats import TalonStats
from .target import Scores, Target
from .transcript import Transcript
from .tree import DraftTree
from .turns import Turn, TurnCache, conditions_of, resumable


def talon_decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter,
    options: Mapping[str, Any],
    streamer: Any = None,
    preallocate: bool = False,
    **model_kwargs: Any,
) -> TalonOutput | Tensor:
    """Decodes with draft trees, in the place of `generate`'s own sampling loop.

    Args:
        model: the target.
        input_ids: (B, L) int64.
        logits_processor, stopping_criteria, generation_config: as `generate` prepared them.
        drafter: proposes tokens.
        options: the caller's `talon_*` arguments; they win over attributes of `generation_config`.
        streamer: gets every new token, then `end()`.
        preallocate: allocate the cache for `max_length` and a tree at once, instead of growing it.
        model_kwargs: what else `generate` prepared for the model's forward.
    """
    config = TalonConfig.resolve(options, vars(generation_config))
    prompt = Prompt.of(model, input_ids, model_kwargs)
    last_place = generation_config.max_length + prompt.lead
    refuse_crossing(model, prompt.lengths(), last_place, config.node_budget)
    rows = list(range(len(prompt.ids)))
    capacity = last_place + config.node_budget if preallocate else 0
    generator, target, turn = _start(model, drafter, config, prompt, capacity, given_cache(model_kwargs))
    lockstep = must_keep_step(logits_processor, stopping_criteria, len(rows))
    stats = TalonStats(lockstep=lockstep)
    picker = Picker(logits_processor, bool(generation_config.do_sample), len(rows), lockstep)
    transcript = _transcript(prompt.ids, stopping_criteria, generation_config, streamer, lockstep)

    with stats.timed("total"):
        _check(model, prompt, config, stats)
        with stats.timed("prefill"):
            scores, commit = _prefill(target, prompt, turn, generation_config)
        tree = DraftTree.from_roots(commit.roots)
        walk(tree, scores.logits, rows, picker, transcript)  # prefill's own token: no tree, no round
        while not all(transcript.finished):
            rows, commit = _leave_finished(rows, commit, transcript, target, generator)
            commit = commit.with_roots(transcript.last(rows))
            with stats.timed("draft"):
                tree = _grow(generator, commit, rows, transcript, target, generation_config)
            with stats.timed("target"):
                scores = target.score(tree)
            with stats.timed("accept"):
                verdict = walk(tree, scores.logits, rows, picker, transcript, RULES[config.acceptance])
            with stats.timed("commit"):
                commit = _commit(target, tree, scores, verdict)
            accepted = [len(path) - 1 for path in verdict.paths]
            stats.count(accepted, verdict.emitted, tree.counts().tolist(), generator.draft_steps)
        transcript.close()
    _leave_turn(target, transcript, drafter, generator, commit)
    return _output(transcript, target, prompt, stats, generation_config)


def _start(
    model: PreTrainedModel,
    drafter: Drafter,
    config: TalonConfig,
    prompt: Prompt,
    capacity: int,
    cache: Any,
) -> tuple[TalonCandidateGenerator, Target, Turn | None]:
    """The drafting and the verifying side of a call, and the turn that it goes on with."""
    begun = None if prompt.embeds is not None else resumable(cache, model, drafter, prompt.ids, prompt.mask)
    turn = begun.turn if begun else None
    if begun is None or turn is None or not are_read_alike(model.config, turn.tokens.shape[1], prompt.ids.shape[1]):
        refuse_lost_media(model, prompt, cache)
        generator = TalonCandidateGenerator(drafter, model, config, rows=len(prompt.ids))
        return generator, Target(model, generator.spec, TurnCache(len(prompt.ids), capacity)), None
    # The turn goes with its call: if this one breaks off half-way, the cache can still be read anew, not gone on with.
    begun.turn = None
    generator = TalonCandidateGenerator(drafter, model, config, session=turn.session)
    return generator, Target(model, generator.spec, begun, turn.next_positions), turn


def _check(model: PreTrainedModel, prompt: Prompt, config: TalonConfig, stats: TalonStats) -> None:
    """Tries a model that no test covers, unless the caller said not to."""
    if config.check:
        with stats.timed("check"):
            probe(model, prompt)


def _prefill(
    target: Target, prompt: Prompt, turn: Turn | None, generation_config: GenerationConfig
) -> tuple[Scores, Commit]:
    """Reads the prompt, or what a turn lacks of it; the commit still lacks its roots."""
    past = 0 if turn is None else turn.tokens.shape[1]
    new = generation_config.max_length - prompt.ids.shape[1]
    scores, places, valid = target.read(prompt, past, new, chunk_size(generation_config.prefill_chunk_size))
    tokens = prompt.tokens()[:, past:]
    commit = Commit(tokens, scores.features, places, valid, torch.zeros_like(tokens[:, 0]), prompt.embeds)
    if not target.spec.embeddings:
        commit = commit.for_tokens()
    return scores, commit if turn is None else turn.unread.then(commit)


def _commit(target: Target, tree: DraftTree, scores: Scores, verdict: Verdict) -> Commit:
    """Keeps the accepted nodes in the cache and gathers what the drafter may read of them."""
    places = target.places(tree)
    target.keep(verdict.paths)
    width = max(len(path) for path in verdict.paths)
    device = tree.tokens.device
    columns = torch.tensor([path + [0] * (width - len(path)) for path in verdict.paths], device=device)
    counts = torch.tensor([len(path) for path in verdict.paths], device=device).unsqueeze(1)
    features = scores.features.gather(1, columns.unsqueeze(2).expand(-1, -1, scores.features.shape[2]))
    valid = torch.arange(width, device=device) < counts
    return Commit(tree.tokens.gather(1, columns), features, places.gather(1, columns), valid, tree.tokens[:, 0])


def _leave_finished(
    rows: list[int], commit: Commit, transcript: Transcript, target: Target, generator: TalonCandidateGenerator
) -> tuple[list[int], Commit]:
    """Takes finished rows out of the batch, so that a long row does not pay for the short ones."""
    staying = [i for i, row in enumerate(rows) if not transcript.has_ended(row)]
    if len(staying) == len(rows):
        return rows, commit
    target.select_rows(staying)
    generator.select_rows(staying)
    return [rows[i] for i in staying], commit.select_rows(staying)


def _leave_turn(
    target: Target, transcript: Transcript, drafter: Drafter, generator: TalonCandidateGenerator, commit: Commit
) -> None:
    """Leaves in the cache what the next turn needs, if it holds every column of one row but the last token's.

    It does not after a masked prompt, or a batch.
    """
    cache, model = target.cache, target.model
    if isinstance(cache, TurnCache) and cache.committed == [transcript.lengths[0] - 1]:
        unread = generator.unread.then(commit) if generator.unread else commit
        tokens = transcript.sequences()[:, :-1]
        cache.turn = Turn(
            tokens,
            target.next_positions,
            drafter,
            generator.session,
            unread,
            weakref.ref(model),
            conditions_of(model, drafter),
        )


def _grow(
    generator: TalonCandidateGenerator,
    commit: Commit,
    rows: Sequence[int],
    transcript: Transcript,
    target: Target,
    generation_config: GenerationConfig,
) -> DraftTree:
    """The draft trees of a round; a row in lockstep that says only padding gets a chain of it and no draft."""
    limits = _depth_limits(rows, transcript, target, generation_config)
    padded = [i for i, row in enumerate(rows) if transcript.is_padded(row)]
    for i in padded:
        limits[i] = 0
    return generator.get_tree(commit, limits).with_chains(padded, transcript.pad)


def _depth_limits(
    rows: Sequence[int], transcript: Transcript, target: Target, generation_config: GenerationConfig
) -> list[int]:
    """Per row, the depth whose acceptance still leaves room for the bonus token, in the text and in the positions."""
    rooms = [generation_config.max_length - transcript.lengths[row] - 1 for row in rows]
    limits = [max(0, min(room, positions)) for room, positions in zip(rooms, target.positions_left(), strict=True)]
    return [min(limits)] * len(limits) if transcript.lockstep else limits


def _transcript(
    input_ids: Tensor,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any,
    lockstep: bool,
) -> Transcript:
    wants = bool(generation_config.return_dict_in_generate)
    return Transcript(
        input_ids,
        stopping_criteria,
        pad_token_id=pad_token(generation_config),
        streamer=streamer,
        keep_scores=wants and bool(generation_config.output_scores),
        keep_logits=wants and bool(generation_config.output_logits),
        lockstep=lockstep,
    )


def _output(
    transcript: Transcript, target: Target, prompt: Prompt, stats: TalonStats, generation_config: GenerationConfig
) -> TalonOutput | Tensor:
    if not generation_config.return_dict_in_generate:
        return transcript.sequences()
    fields: dict[str, Any] = {"scores": transcript.scores(), "logits": transcript.logits()}
    output = TalonOutput(sequences=cast(LongTensor, transcript.sequences()), talon_stats=stats, **fields)
    # Rows at their own pace leave the batch at different times, so no cache is whole at the end.
    is_whole = transcript.lockstep or len(transcript.lengths) == 1
    if is_whole and prompt.mask is not None and not bool(prompt.mask.all()):
        target.cache.spread(prompt.mask)
    output.keep_cache(target.cache if is_whole else None)
    return output
