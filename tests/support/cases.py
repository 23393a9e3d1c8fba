"""The battery's rows: every way of training that could make an offloaded run differ from a resident one."""

from __future__ import annotations

import torch

from support.gpt import GPTShape
from support.training import Case

CASES = [
    Case("plain-ddp"),
    Case("block-second-moment", optimizer={"factored_v_2d": False}),
    Case("no-sync-accumulation", accumulate=3),
    Case("static-graph", ddp={"static_graph": True}),
    Case("unused-branch", GPTShape(tower=True), ddp={"find_unused_parameters": True}, skip_tower_at=2),
    Case("late-branch", GPTShape(tower=True), ddp={"find_unused_parameters": True}, skip_tower_at=0),
    Case("bucket-view", ddp={"gradient_as_bucket_view": True}),
    Case("bf16-compress-hook", compress=True),
    Case("activation-checkpointing", GPTShape(recompute=True)),
    Case("clip-grad-norm", clip=0.5),
    Case("overflow-on-one-rank", autocast=True, scaler_overflow_at=2),
    Case("overflow-first-step", scaler_overflow_at=0, clip=1.0),
    Case("lr-schedule", schedule=True),
    Case("parameter-groups", groups=True, optimizer={"weight_decay": 0.01}),
    Case("frozen-then-thawed", thaw_at=3),
    Case("tied-embedding", GPTShape(tied=True)),
    Case("many-same-shape-layers", GPTShape(layers=6)),
    Case("codebook-refresh", optimizer={"codebook_refresh_every": 2}),
    Case("refresh-block", optimizer={"codebook_refresh_every": 3, "factored_v_2d": False}),
    Case("bfloat16", dtype=torch.bfloat16),
    Case("bfloat16-block", dtype=torch.bfloat16, optimizer={"factored_v_2d": False, "weight_decay": 0.1}),
    Case("bfloat16-groups-refresh", dtype=torch.bfloat16, groups=True, optimizer={"codebook_refresh_every": 2}),
    Case("autocast-bf16", autocast=True),
    Case("period-one", optimizer={"force_1d_period_one": True, "period_one_substrings": ("norm",)}),
    Case("uneven-inputs-join", uneven=True),
]


def with_path(case: Case, fused: bool) -> Case:
    """The same row on the fused kernels or on the plain path."""
    path = "fused" if fused else "plain"
    return Case(**{**vars(case), "id": f"{case.id}-{path}", "optimizer": {**case.optimizer, "fused": fused}})
