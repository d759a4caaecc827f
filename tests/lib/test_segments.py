"""Where vLLM's joined and sharded tensors come from: the map that the engine proves at its start."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import refused
from hypothesis import given
from hypothesis import strategies as st
from noise_by_numpy import filled

from evoalign_lib.engines._vllm_worker import NotMapped, WorkerExtension, part_of, segments_of, shard
from evoalign_lib.engines.proof import WrongWeights, as_matrix, compare
from evoalign_lib.precision import matrix_digest, open_weights

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
DIM, HIDDEN = 4, 8


def layer(kind: str, **values):
    """An object of a class with the name of one of vLLM's, of which the map reads nothing else."""
    return type(kind, (SimpleNamespace,), {})(**values)


def shards(heads: int, kv_heads: int, ranks: int, intermediate: int, vocabulary: int):
    """A model's parameters, and what each rank of vLLM's would hold of them: (layer, name, tensor), by vLLM's rules."""
    generator = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (vocabulary, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for name, held in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        shapes |= {f"a.{name}_proj.weight": (held * DIM, HIDDEN), f"a.{name}_proj.bias": (held * DIM,)}
    shapes |= {"a.o_proj.weight": (HIDDEN, heads * DIM), "a.o_proj.bias": (HIDDEN,), "one.weight": (ranks * 3, HIDDEN)}
    shapes |= {f"m.{name}_proj.weight": (intermediate, HIDDEN) for name in ("gate", "up")}
    shapes |= {"m.down_proj.weight": (HIDDEN, intermediate)}
    whole = {name: torch.from_numpy(generator.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}

    def rows(name, rank, size):
        first, n = shard(len(whole[name]), rank, size)
        return whole[name][first : first + n]

    replicas = max(1, ranks // kv_heads)
    found = []
    for rank in range(ranks):
        at = {"tp_rank": rank, "tp_size": ranks}
        kv = rank // replicas, ranks // replicas
        qkv = {"total_num_heads": heads, "total_num_kv_heads": kv_heads, "head_size": DIM, "v_head_size": DIM}
        qkv_layer = layer("QKVParallelLinear", num_kv_head_replicas=replicas, **qkv, **at)
        padded = -(-vocabulary // (ranks * 8)) * 8
        first, last = min(rank * padded, vocabulary), min((rank + 1) * padded, vocabulary)
        held = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=last)
        table = torch.full((padded, HIDDEN), torch.nan)
        table[: last - first] = whole["model.embed_tokens.weight"][first:last]
        own = [(layer("VocabParallelEmbedding", shard_indices=held, **at), "model.embed_tokens.weight", table)]
        for leaf in ("weight", "bias"):
            parts = [rows(f"a.q_proj.{leaf}", rank, ranks), *(rows(f"a.{n}_proj.{leaf}", *kv) for n in "kv")]
            own.append((qkv_layer, f"a.qkv_proj.{leaf}", torch.cat(parts)))
        for name in ("a.o_proj.weight", "m.down_proj.weight"):
            start, n = shard(whole[name].shape[1], rank, ranks)
            row = layer("RowParallelLinear", input_size=whole[name].shape[1], **at)
            own.append((row, name, whole[name][:, start : start + n]))
        own.append((layer("RowParallelLinear", input_size=heads * DIM, **at), "a.o_proj.bias", whole["a.o_proj.bias"]))
        up = layer("MergedColumnParallelLinear", output_sizes=[intermediate, intermediate], **at)
        joined = torch.cat([rows(f"m.{n}_proj.weight", rank, ranks) for n in ("gate", "up")])
        own.append((up, "m.gate_up_proj.weight", joined))
        one = layer("ColumnParallelLinear", output_size=ranks * 3, **at)
        own.append((one, "one.weight", rows("one.weight", rank, ranks)))
        own.append((layer("RMSNorm"), "model.norm.weight", whole["model.norm.weight"]))
        found.append(own)
    return whole, found


def opened(whole, ranks):
    """Layout and master of the model; and the proof of each rank, as the workers answer."""
    maps = [[(s, part_of(t, s)) for own, name, t in rank for s in segments_of(own, name, t, PACKED)] for rank in ranks]
    return *filled(whole), [[(tuple(s), matrix_digest(part)) for s, part in m] for m in maps]


def prove(layout, master, proof):
    compare({name: as_matrix(view) for name, view in layout.views(torch.from_numpy(master)).items()}, proof)


@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 2, 7]),
    ranks=st.sampled_from([1, 2, 4]),
    vocabulary=st.integers(1, 90),
)
def test_every_rank_holds_what_the_map_says_and_together_they_hold_all(kv_heads, group, ranks, vocabulary):
    heads = kv_heads * group * ranks
    whole, found = shards(heads, kv_heads, ranks, intermediate=12, vocabulary=vocabulary)
    prove(*opened(whole, found))


def test_the_proof_names_what_differs():
    whole, found = shards(4, 2, 2, intermediate=12, vocabulary=20)
    layout, master, proof = opened(whole, found)
    for changed in range(layout.size):
        entry = next((e for e in layout.entries if e.offset <= changed < e.offset + e.rows * e.cols), None)
        if entry is not None and changed % 37 == 0:
            other = master.copy()
            other[changed] += 1e-6
            with pytest.raises(WrongWeights, match=entry.name):
                prove(layout, other, proof)
    del proof[1][[segment[0] for segment, _ in proof[1]].index("m.down_proj.weight")]
    with pytest.raises(WrongWeights, match="'m.down_proj.weight': vLLM holds 50% of it"):
        prove(layout, master, proof)
    with pytest.raises(WrongWeights, match="no parameter of this name"):
        prove(layout, master, [[(("lm_head.weight", 0, 0, 1, 1), "0")]])


QKV, JOINED = layer("QKVParallelLinear"), PACKED | {"qkv_proj": ["qkv_proj"]}
test_what_cannot_be_mapped_is_refused_by_name = refused(
    (QKV, "a.qkv_proj.weight", torch.zeros(0), PACKED, "'a.qkv_proj.weight' is empty in vLLM"),
    (layer("Linear"), "a.o_proj.weight", torch.zeros(2, 2, dtype=torch.int8), PACKED, "is torch.int8 in vLLM"),
    (QKV, "x.qkv_proj.weight", torch.zeros(4, 2), JOINED, "is joined in the checkpoint"),
    (layer("Strange"), "m.gate_up_proj.weight", torch.zeros(4, 2), PACKED, "joins .* in a Strange"),
    call=segments_of,
    error=NotMapped,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_worker_decays_toward_what_it_has_loaded(dtype):
    """As the process that trains does, by other code; from the working copy, whatever member it holds by then."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)).to(dtype)
    worker, weights = WorkerExtension(), open_weights(model, anchor_decay=0.25)
    worker.model_runner = SimpleNamespace(model=model)
    moving = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert worker.evoalign_open(4, {"anchor_decay": 0.25, "moving": moving}) is None
    for keys in ([1, 2], [], [3]):
        worker.evoalign_perturb(9, 0.1, 1)
        coefficients = np.linspace(-0.1, 0.2, len(keys), dtype=np.float32)
        worker.evoalign_update(keys, coefficients)
        weights.update(np.array(keys, np.uint64), coefficients)
        views = weights.layout.views(weights.flat)
        for (name, *_), digest in worker.evoalign_proof():
            assert digest == matrix_digest(torch.from_numpy(views[name])), name
