"""The battery's rows: every way of training that could make an offloaded run differ from a resident one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from gefen_offload import OffloadPolicy
from support.gpt import GPTShape
from support.training import Case

DEFERRED = OffloadPolicy(deferred=True)
SMALL = OffloadPolicy(staging_bytes=6000)

CASES = [
    Case("plain-ddp"),
    Case("block-second-moment", optimizer={"factored_v_2d": False}),
    Case("no-sync-accumulation", accumulate=3),
    Case("static-graph", ddp={"static_graph": True}),
    Case("unused-branch", GPTShape(tower=True), ddp={"find_unused_parameters": True}, skip_tower_at=2),
    Case("late-branch", GPTShape(tower=True), ddp={"find_unused_parameters": True}, skip_tower_at=0),
    Case("bucket-view", ddp={"gradient_as_bucket_view": True}),
    Case("bf16-compress-hook", hook=bf16_compress_hook),
    Case("activation-checkpointing", GPTShape(recompute=True)),
    Case("clip-grad-norm", clip=0.5),
    Case("overflow-on-one-rank", autocast=torch.bfloat16, scaler_overflow_at=2),
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
    Case("autocast-bf16", autocast=torch.bfloat16),
    Case("period-one", optimizer={"force_1d_period_one": True, "period_one_substrings": ("norm",)}),
    Case("uneven-inputs-join", uneven=True),
    Case("float16", dtype=torch.float16, optimizer={"lr": 1e-3}),
    Case("autocast-fp16-scaler", autocast=torch.float16, scaler_overflow_at=1, clip=1.0),
    Case("checkpointing-bfloat16", GPTShape(recompute=True), dtype=torch.bfloat16, policy=DEFERRED),
    Case("accumulation-clip-schedule", accumulate=2, clip=0.5, schedule=True, policy=DEFERRED),
    Case("tied-and-frozen", GPTShape(tied=True), thaw_at=2, policy=SMALL),
    Case("late-group", thaw_at=3, late=True, groups=True, policy=SMALL),
    Case("restored-and-again", restore=(2,), activate=(4,), policy=SMALL, optimizer={"codebook_refresh_every": 3}),
    Case("one-byte-windows", policy=OffloadPolicy(staging_bytes=1)),
    Case("small-windows", GPTShape(layers=4), policy=SMALL),
    Case("small-windows-deferred", GPTShape(layers=4), dtype=torch.bfloat16, policy=replace(SMALL, deferred=True)),
    Case("pageable-memory", policy=OffloadPolicy(staging_bytes=2**16, pinned=False), groups=True),
    Case("deferred-refresh", policy=DEFERRED, optimizer={"codebook_refresh_every": 2, "weight_decay": 0.1}),
]


def with_path(case: Case, fused: bool) -> Case:
    """The same row on the fused kernels or on the plain path."""
    path = "fused" if fused else "plain"
    return Case(**{**vars(case), "id": f"{case.id}-{path}", "optimizer": {**case.optimizer, "fused": fused}})
