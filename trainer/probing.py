"""The trainer's side of the log-prob probe: its own forward pass over fixed tokens, for engines to compare with.

It does not know how the probe travels (`relay.probe`).
"""

import logging

import numpy as np

from laminar.errors import RelayError
from relay.probe import Probe, probe_tokens
from trainer.batches import RowShape
from trainer.engine import TrainerEngine
from trainer.packing import Row, pack_rows, unpack_rows

logger = logging.getLogger("laminar.trainer.probing")


def score_probe(engine: TrainerEngine) -> Probe | None:
    """What the weights as they are make of the probe's tokens; all ranks call it together.

    Returns:
        None if a log-prob is not finite, which is logged: there is nothing to compare with then.
    """
    token_ids = probe_tokens(engine.model.config.vocab_size)
    batch = pack_rows([probe_row(token_ids)], share_prompts=engine.layout.shares_prompts, device=engine.ranks.device)
    (logprobs_T,) = unpack_rows(engine.score(batch), [probe_row(token_ids)], share_prompts=engine.layout.shares_prompts)
    try:
        return Probe(token_ids, tuple(logprobs_T[1:].tolist()))
    except RelayError as error:
        logger.warning("%s", error)
        return None


def probe_row(token_ids: tuple[int, ...]) -> Row:
    """The probe's tokens as a row whose tokens, but for the first, are all scored."""
    num_tokens = len(token_ids)
    return Row(
        shape=RowShape("probe", prompt=0, prompt_tokens=1, response_tokens=num_tokens - 1),
        token_ids=np.asarray(token_ids, np.int32),
        mask=np.arange(num_tokens) > 0,
        rollout_logprobs=np.full(num_tokens, np.nan, np.float32),
        versions=np.full(num_tokens, -1, np.int32),
        temperature=1.0,
        advantage=0.0,
        sequence_tokens=num_tokens - 1,
    )
