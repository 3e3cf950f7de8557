"""What runs with ``--exhaustive`` alone: one of many of a kind, each of which has others that always run.

    python -m pytest               a quarter of the random seeds, the smaller of two jobs, not what is named here,
                                   and of files with many trainings a third
    python -m pytest --part 1      the same with the second third of these; 2: the last one; all: all of these
    python -m pytest --exhaustive  everything

Workers of several processes run only what the chosen tests name (``choice.py``), so that this saves the work.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

VARIABLE = "MADPIPE_EXHAUSTIVE"
"""The environment variable that tells modules of tests, and the processes that they start."""
ONE_SEED_IN = 4

NAMED: dict[str, Sequence[str]] = {
    "engine/test_any_plan.py": [
        *(
            f"test_case[{case}]"
            for case in (
                "2-what_else_deepspeeds_engine_does", "2-planned_onto_several_stages", "2-plans_from_everywhere",
                "2-an_error_in_the_warm_up", "4-two_pipelines_of_any_map",
            )
        ),
        "test_all_ranks_end_when_the_data_of_one_does",
    ],
    "engine/test_checkpoints.py": [
        *(
            f"test_every_layout_is_loaded_under_others[{kind}]"
            for kind in (
                "SGD, ZeRO 0", "AdamW, ZeRO 0", "SGD, ZeRO 1", "bf16, ZeRO 0", "noisy, ZeRO 0", "tied, ZeRO 0",
                "noisy, ZeRO 1", "bf16, ZeRO 1",
            )
        ),
        "test_every_pair_of_layouts_was_tried[SGD, ZeRO 0]",
    ],
    "engine/test_frozen.py": [
        "test_a_rank_that_comes_late",
        "test_a_rank_that_takes_its_time_is_only_spoken_of",
    ],
    "engine/test_interruption.py": [
        "test_ctrl_c_in_a_terminal_ends_all_ranks[torchrun]",
        "test_ctrl_c_in_a_terminal_ends_all_ranks[deepspeed]",
    ],
    "engine/test_killed.py": [
        "test_torchrun_ends_the_job",
        *(
            f"test_the_next_run_goes_on_from_the_last_complete_checkpoint[{death}]"
            for death in (
                "while_rank_1_measures", "while_rank_1_waits_for_the_plan", "after_the_move",
                "before_it_has_the_name_of_another", "while_the_old_one_is_removed", "before_the_latest_is_named",
                "in_a_step_of_the_warm_up", "while_states_move", "after_a_checkpoint_of_the_plan",
                "stashing_then_stashing", "2bw_then_2bw", "vertical-sync_then_vertical-sync", "2bw_then_flush",
                "flush_then_stashing",
                *(
                    f"{mode}_then_{mode}_in_{form}"
                    for mode in ("stashing", "2bw", "vertical-sync")
                    for form in ("zero", "bf16", "zero_and_bf16")
                    if (mode, form) != ("2bw", "zero_and_bf16")
                ),
            )
        ),
    ],
    "engine/test_pipelines.py": [
        *(
            f"test_case[4-{case}]"
            for case in (
                "experts_with_an_auxiliary_loss", "a_network_that_reaches_back", "a_recurrent_network",
                "an_encoder_and_a_decoder",
            )
        ),
        "test_case[2-a_data_set_given_to_the_engine]",
        "test_case[2-groups_that_are_empty_on_a_rank]",
        "test_case[4-neox_with_other_axes]",
    ],
    "engine/test_scripts.py": ["test_the_tutorial[torchrun]", "test_neox[torchrun-4]"],
    "engine/test_ends.py": ["test_all_end[killed_0-1-1-0_rank0]", "test_all_end[raised_0-1-1-0_rank0]"],
    "engine/test_strangers.py": [
        "test_case[tied_layers_of_different_classes]",
        "test_case[tied_layers_of_different_classes_in_other_runs]",
        "test_case[experts_with_an_auxiliary_loss]",
    ],
    "engine/test_timeline.py": ["test_case[the_timeline_is_what_ran]"],
    "engine/test_training_state.py": [
        f"test_case[{case}]"
        for case in (
            "2-groups_that_become_empty_and_fill_again", "2-layers_that_recompute_anyway", "2-memory_of_a_move",
            "2-what_else_a_warm_up_measures", "2-schedules_go_on_after_a_warm_up",
            "2-adagrad_and_the_configurations_optimizer", "4-replicas",
            "4-replicas_give_a_step_up_together", "2-fp16_with_its_loss_scale",
        )
    ],
    "lightning/test_lightning_after_fit.py": [
        *(
            f"test_what_a_later_trainer_asks_for_is_run[{case}]"
            for case in ("plan first", "recut to a plan")
        ),
        "test_the_whole_module_has_the_weights_that_are_saved",
    ],
    "lightning/test_lightning_callbacks.py": [
        *(
            f"test_two_stages_do_as_one_process[{case}]"
            for case in (
                "optimizers", "settings", "profilers", "own_steps", "folders_on_other_stages",
                "rate_finder_with_a_plan", "averages",
            )
        ),
        *(f"test_the_checkpoints_that_one_process_keeps_are_kept[kept {kind}]" for kind in (
            "epochs", "link", "interval", "weights",
        )),
        "test_low_precision_is_close",
        "test_the_loss_scale_is_that_of_the_configuration",
        "test_settings_of_a_second_fit_are_those_it_has_then",
        "test_whole_model_files_of_two_pipelines_are_those_of_one",
        "test_either_package_may_be_absent[lightning-pytorch_lightning pytorch_lightning\\n]",
        "test_either_package_may_be_absent[pytorch_lightning-lightning.pytorch lightning\\n]",
    ],
    "lightning/test_lightning_captured.py": [
        f"test_what_cannot_be_captured_is_refused_with_its_line[{module}]"
        for module in ("RateOfTrainer", "CarryingForBatches", "ByChanceFound", "NoCall")
    ],
    "lightning/test_lightning_ended.py": [
        f"test_both_ranks_end[{case}]"
        for case in (
            "sigterm_to_rank_1", "an_error_before_a_batch", "an_error_before_the_optimizer_step",
            "an_error_at_the_end_of_an_epoch", "an_error_while_a_checkpoint_is_saved", "an_error_of_the_schedule",
            "an_error_after_a_batch", "an_error_of_the_optimizer", "caught_in_the_data", "caught_in_a_hook",
            "unreadable_data", "an_error_in_validation",
            "a_stream_that_ends_early_on_rank_1", "sigint_in_a_hook_of_rank_1",
        )
    ],
    "lightning/test_lightning_killed.py": [
        f"test_the_next_fit_goes_on_from_the_last_complete_checkpoint[{death}]"
        for death in (
            "in_a_step_of_the_warm_up", "after_the_move", "before_the_last_one_has_its_name",
            "in_flight_with_stashing_and_zero", "in_flight_with_vertical_sync",
        )
    ],
    "lightning/test_lightning_losses.py": [
        *(
            f"test_a_loss_trains_as_in_one_process[{case}]"
            for case in (
                "padded later", "hidden weights", "divided", "statistics", "time first", "accumulated",
                "warmed up padded", "missing later", "changing in warm-up", "accumulated changing", "switched on",
                "in place", "own generator", "accumulated drawing", "clipped", "padding as label", "seeded",
                "in place contrastive", "infinite at first",
            )
        ),
        "test_two_pipelines_take_the_mean_of_their_batches_losses",
    ],
    "lightning/test_lightning_names.py": [
        "test_a_hook_that_needs_a_tensor_of_another_rank_is_told_what_it_may_do[SetByRank]",
        "test_a_hook_that_needs_a_tensor_of_another_rank_is_told_what_it_may_do[BufferLogged]",
        "test_layers_run_in_the_state_in_which_the_step_calls_them[attributes, once per batch]",
        "test_layers_run_in_the_state_in_which_the_step_calls_them[set back]",
        "test_what_changes_later_is_refused_on_every_rank[ScaledByCalls]",
        *(
            f"test_hooks_that_see_a_part_of_the_parameters_are_told_once[{case}]"
            for case in (
                "RateOfAll", "NormsLogged", "looking zero", "Stacked", "NormOfOneEach", "LookingLate",
                "looking bf16", "counted bf16", "StatesCounted", "ScaledAtRandom", "NormsOfLightning",
                "CountedInStep", "counted zero", "PlacesOfOptimizer", "StatesAsked",
            )
        ),
        *(
            f"test_what_cannot_be_done_with_a_part_of_the_parameters_is_refused[{case}]"
            for case in (
                "OnRankZero", "StepsWithClosure", "RateBeforeForward", "clipped bf16", "ratio zero",
                "StepsByPlace",
                "HeadClamped measured", "NormInEvaluation", "StateInStep", "EpochEndedAlone", "ClippingReplaced",
                "EvaluatedTwice", "LearnedWeights", "HeadClamped", "NormBeforeForward", "StepsWithNoise",
            )
        ),
        *(
            f"test_groups_that_are_made_by_names_train_like_one_process[{groups}]"
            for groups in ("by name", "by name, moved", "per parameter", "named, moved")
        ),
        *(
            f"test_what_changes_later_is_refused_on_every_rank[{case}]"
            for case in (
                "ScaledBySettings", "ScaledByEpoch", "WithAuxiliaryAtTheEnd", "ScaledInEvaluation",
                "UnfrozenWithoutRate", "WithCollected",
            )
        ),
    ],
    "lightning/test_lightning_pipeline.py": [
        *(
            f"test_a_pipeline_that_never_drains_trains_as_delayed_updates_in_one_process[{case}]"
            for case in ("stashing, adam", "2bw, momentum", "vertical-sync, momentum")
        ),
        *(
            f"test_a_pipeline_that_never_drains_goes_on_from_a_checkpoint[{pair}]"
            for pair in (
                "stashing to stashing", "stashing to vertical-sync", "stashing to flush", "2bw to stashing",
                "2bw to vertical-sync", "2bw to flush", "vertical-sync to stashing", "vertical-sync to 2bw",
                "vertical-sync to vertical-sync", "vertical-sync to flush",
            )
        ),
        "test_a_pipeline_that_never_drains_in_other_forms[zero 1]",
        "test_four_ranks_that_never_drain",
        "test_several_stages_on_a_rank_train_like_one_process[several_stages_in_all_forms]",
        "test_runs_that_move_are_those_that_never_do[momentum]",
        "test_runs_that_move_are_those_that_never_do[Signs]",
        "test_two_stages_train_like_one_process[announced_shapes]",
        "test_two_stages_train_like_one_process[part_groups_zero_1]",
        "test_batches_of_a_window_make_one_step_and_log_each[accumulated]",
        "test_a_resumed_run_is_the_uninterrupted_one[resumed_zero_1]",
        *(
            f"test_a_fit_says_when_it_plans[{run}]"
            for run in (
                "steps given", "no steps given", "four steps", "five steps", "stream of one epoch", "fast", "plan",
                "one epoch", "stream", "ended early",
            )
        ),
        *(f"test_four_stages_train_like_one_process[{case}]" for case in ("clipped", "zero_1", "tied")),
        *(
            f"test_two_pipelines_of_two_stages_train_like_one_process_on_their_batches[{case}]"
            for case in ("replicated", "replicated_zero_1", "replicated_clipped")
        ),
        "test_a_resumed_run_of_four_stages_is_the_uninterrupted_one",
        "test_a_checkpoint_of_every_cut_is_loaded_under_every_other[4-2]",
    ],
    "lightning/test_lightning_steps.py": [
        *(
            f"test_loops_are_those_of_one_process[{case}]"
            for case in ("several", "min steps")
        ),
        "test_weights_without_a_gradient_are_left_as_in_one_process[tied, moved]",
        "test_zeros_for_weights_without_a_gradient_are_told[tied, half]",
        "test_four_stages_do_what_one_process_does[left_behind]",
        *(
            f"test_loops_are_those_of_one_process[{settings}]"
            for settings in (
                "interval", "no validation", "overfit", "fast", "stopped", "min epochs", "fraction", "limits",
                "steps",
            )
        ),
        "test_a_job_that_torchrun_started_ends_where_one_rank_fails",
        *(
            f"test_weights_without_a_gradient_are_left_as_in_one_process[{run}]"
            for run in ("heads, momentum", "heads, clipped", "heads, resumed")
        ),
    ],
    "planner/test_identical_stages.py": ["test_an_optimum_above_the_bound"],
    "planner/test_mcap.py": ["test_bayesian_optimization_comes_close"],
    "planner/test_refutation.py": [
        "test_just_the_periods_that_no_pattern_has_are_refuted[any_instance]"
    ],
    "planner/test_time_limit.py": [
        f"test_an_interrupt_is_answered_at_once[{command}]" for command in ("frontier", "paper")
    ],
    "test_examples.py": [
        "test_a_hugging_face_model_is_fine_tuned",
        "test_training_with_deepspeed_prints_plan_and_measurements",
        "test_factories_can_be_profiled_and_planned[gpt]",
    ],
    "test_vision_networks.py": [
        "test_parameters_and_operations[resnet101-44549160-224-7.8]",
        "test_parameters_and_operations[densenet121-7978856-224-2.83]",
    ],
}  # fmt: skip
"""Tests by file, below this folder: as pytest names them, or by the first of several parameters alone; without
brackets all that a function makes of its parameters."""


NUM_PARTS = 3
"""Into how many parts the tests of the files below are cut, by a checksum of their names; one of them runs."""
IN_PARTS = frozenset((
    "engine/test_any_plan.py", "engine/test_checkpoints.py", "engine/test_pipelines.py",
    "engine/test_strangers.py", "engine/test_training_state.py", "lightning/test_lightning_after_fit.py",
    "lightning/test_lightning_callbacks.py", "lightning/test_lightning_captured.py",
    "lightning/test_lightning_losses.py", "lightning/test_lightning_names.py",
    "lightning/test_lightning_pipeline.py", "lightning/test_lightning_steps.py",
    "lightning/test_lightning_writing.py",
))  # fmt: skip
"""Files with a thousand tests of trainings by several processes, most of which were once a fault of their own."""


def is_exhaustive() -> bool:
    """Whether everything runs."""
    return bool(os.environ.get(VARIABLE))


def some(most: int) -> int:
    """``most``, or a quarter of it: how many random cases a test makes for itself."""
    return most if is_exhaustive() else max(1, most // ONE_SEED_IN)


def left_out(items: Iterable[pytest.Item], folder: Path, part: str) -> list[pytest.Item]:
    """The tests among ``items`` that do not run by default.

    Args:
        folder: This one.
        part: What runs of files in parts: a number, or ``"all"``.
    """
    items = list(items)
    fewest: dict[tuple[Path, object], int] = {}
    for item in items:
        case, size = _job(item)
        if case is not None:
            fewest[item.path, case] = min(size, fewest.get((item.path, case), size))
    named = {(folder / file, name) for file, names in NAMED.items() for name in names}
    found = []
    for item in items:
        case, size = _job(item)
        seed = _parameters(item).get("seed")
        if (
            any((item.path, name) in named for name in _names(item))
            or (isinstance(seed, int) and seed % ONE_SEED_IN)
            or _is_of_another_part(item, folder, part)
            or (case is not None and size > fewest[item.path, case])
        ):
            found.append(item)
    return found


def _is_of_another_part(item: pytest.Item, folder: Path, part: str) -> bool:
    is_cut = part != "all" and item.path.relative_to(folder).as_posix() in IN_PARTS
    return is_cut and str(zlib.crc32(item.name.encode()) % NUM_PARTS) != part


def unknown(items: Iterable[pytest.Item], folder: Path) -> list[str]:
    """Names above that stand for no test of the collected files."""
    items = list(items)
    files = {item.path for item in items}
    known = {(item.path, name) for item in items for name in _names(item)}
    return [
        f"{file}::{name}"
        for file, names in NAMED.items()
        for name in names
        if folder / file in files and (folder / file, name) not in known
    ]


def _names(item: pytest.Item) -> set[str]:
    function = getattr(item, "originalname", item.name)
    first = next(iter(_parameters(item).values()), None)
    return {item.name, function, f"{function}[{first}]"}


def _job(item: pytest.Item) -> tuple[object, int]:
    """The case that a job of so many processes runs; None where a test is not about one."""
    parameters = _parameters(item)
    size = parameters.get("num_processes")
    return (parameters.get("case"), size) if isinstance(size, int) else (None, 0)


def _parameters(item: pytest.Item) -> dict[str, object]:
    own = getattr(item, "callspec", None)
    return {} if own is None else own.params
