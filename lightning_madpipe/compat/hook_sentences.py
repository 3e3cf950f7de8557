"""What is told of hooks that compute with the parameters of one rank, in the words that the user sees.

Each sentence has places for the hook (``place``) and for parameters (``names``), or for a number of them.
"""

from __future__ import annotations

SEVERAL = (
    "{place} computes with several parameters or gradients together ({names}, ...), and a rank of a pipeline has "
    "those of its own layers only, after a move others: a norm, a sum or a decision differs. For the norm of all "
    "gradients use torch.nn.utils.clip_grad_norm_ in on_before_optimizer_step, or Trainer(gradient_clip_val=...); "
    "else torch.distributed.all_reduce brings the ranks' parts together"
)
NUMBERS_OF_SEVERAL = (
    "{place} takes numbers out of several parameters or gradients ({names}, ...), and a rank of a pipeline has "
    "those of its own layers only: what is made of all of them differs; of each by itself it does not while its "
    "layer stays, but a logger or a file of rank 0's gets those of rank 0's layers alone. For the norm of all "
    "gradients use torch.nn.utils.clip_grad_norm_ in on_before_optimizer_step, "
    "or Trainer(gradient_clip_val=...); else torch.distributed.all_reduce brings the ranks' parts together"
)
ELEMENTS_OF_SEVERAL = (
    "{place} counts the elements of several parameters ({names}, ...), and a rank of a pipeline has those of its "
    "own layers only: a number of all covers one part only, and differs from rank to rank; where each is treated "
    "by itself, nothing differs. Count them before fit, or in a step, which is shown all, or bring the ranks' "
    "parts together, as by torch.distributed.all_reduce"
)
_COUNTED = (
    ", and a rank of a pipeline has those of its own layers only (under stage=1, bf16 and fp16 one flat tensor of "
    "each group): a number of all covers one part only, and differs from rank to rank. Count self.parameters() "
    "before fit, or in a step, which is shown all, or bring the ranks' parts together, as by "
    "torch.distributed.all_reduce"
)
COUNTED_PARAMETERS = "{place} counts the optimizer's parameters (here len(group['params']) is {number})" + _COUNTED
COUNTED_STATES = (
    "{place} counts the parameters that the optimizer has a state of (here len(optimizer.state) is {number})"
    + _COUNTED
)
PLACES = (
    "{place} takes the optimizer's parameters by their places, and a rank of a pipeline has those of its own "
    "layers only: the first one here is another one than in one process. Go through self.parameters(), which has "
    "all of them in a hook that counts places, or by the names of self.named_parameters(), or make a group for "
    "each kind in configure_optimizers"
)
LOGGED = (
    "{place} logs values of single parameters ({names}, ...): each rank logs those of its own layers, and the "
    "loggers, which are rank 0's, get those of rank 0's layers alone. Bring them together first, as by "
    "torch.distributed.all_gather_object, and log the same on each rank"
)
RANDOM = (
    "{place} draws random numbers for parameters ({names}, ...), and each rank of a pipeline draws them for its "
    "own layers only: weights, and all numbers that are drawn later, differ from those of one process. Draw from "
    "a generator for each parameter, `torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)`"
)
WHOLE_STATE = (
    "{place} asks for state_dict(), which has the layers of this rank only. What is computed of each layer, such "
    "as an average, each rank has for its own, and a file that rank 0 writes of it has its layers alone: "
    "trainer.strategy.lightning_module_state_dict(), called on every rank, gives the whole to rank 0, and "
    "trainer.save_checkpoint(path, weights_only=True) writes it"
)
CLEARED = (
    "{place} looks at gradients ({names}, ...), which the pipeline's engine has cleared with the optimizer's "
    "step: they are None there. on_before_optimizer_step has them"
)
CLEARED_BEFORE = (
    "{place} looks at gradients ({names}, ...) before the backward of its step. One process still has those of "
    "the step before there, or with accumulate_grad_batches those of the batches so far; here they are None. "
    "on_before_optimizer_step has those of the step"
)
IN_BUFFERS = (
    "{place} looks at gradients ({names}, ...), and under stage=1, bf16 and fp16 those of a step lie in flat "
    "buffers of DeepSpeed's: what is there is None or a part. Trainer(gradient_clip_val=...) clips them; "
    "precision='32-true' and stage=0 show them"
)
COPY_OF_A_PART = (
    "{place} changes {target}, a copy beside the layers, by {source}, and each rank would change a part of it. "
    "Average by hand in a dict by the names of self.named_parameters(); let a target network load "
    "trainer.strategy.broadcast(trainer.strategy.lightning_module_state_dict()) on all ranks; a teacher that "
    "moves in each step needs the strategy 'ddp'"
)
AFTER_THE_CLOSURE = (
    "{place} looks at gradients after the closure ({names}, ...), which has made the optimizer's step already, "
    "so that nothing that is done to them counts: clip by Trainer(gradient_clip_val=...), and do what else is to "
    "be done in on_before_optimizer_step"
)
