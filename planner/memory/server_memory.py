"""What llama-server keeps in host memory beside the plan's own: checkpoints of conversations, past prompts.

Models whose cache cannot be cut back (recurrent state, sliding windows) are computed anew where a
conversation goes on in another way than before, unless a checkpoint is near. The server takes 32 of each
sequence and 8 GiB for past prompts unless told, whatever the host has left.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.constants import GIB, MIB

MOST_CHECKPOINTS = 32  # of each sequence, unless told
MOST_PROMPTS_BYTES = 8 * GIB  # unless told
_SLACK_BYTES = GIB  # for all else


@dataclass(frozen=True, slots=True)
class Kept:
    """What a server may keep in what a plan leaves of the host's memory."""

    checkpoints: int  # of each sequence
    checkpoint_bytes: int  # of one, of one sequence; 0: the model needs none
    n_seq: int
    prompts_bytes: int

    @property
    def checkpoints_bytes(self) -> int:
        """Of all sequences together."""
        return self.checkpoints * self.checkpoint_bytes * self.n_seq


def kept(left_bytes: int, checkpoint_bytes: int, n_seq: int) -> Kept:
    """The server's own limits, or what fits: checkpoints in half of what is left and 1 GiB less, past
    prompts (whole MiB) in the rest.
    """
    left = max(left_bytes // MIB * MIB - _SLACK_BYTES, 0)
    one = checkpoint_bytes * n_seq
    count = min(MOST_CHECKPOINTS, left // 2 // one) if one else MOST_CHECKPOINTS
    rest = left - -(-one * count // MIB) * MIB
    return Kept(count, checkpoint_bytes, n_seq, min(rest, MOST_PROMPTS_BYTES))
