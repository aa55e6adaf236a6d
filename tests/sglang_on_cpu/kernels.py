"""SGLang's two verification kernels in plain Python, after its sources in C++
(kernels/jit/include/sgl_kernel/speculative/eagle.cuh and sampling.cuh of 0.5.23)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

END = -1


def children(next_token: Tensor, next_sibling: Tensor, node: int) -> list[int]:
    """Return the children of a node in a request's tree."""
    found = []
    child = int(next_token[node])
    while child != END:
        found.append(child)
        child = int(next_sibling[child])
    return found


def verify_tree_greedy(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Descend from each root to the child that the target predicts."""
    for b in range(len(candidates)):
        path = [0]
        while len(path) < accept_index.shape[1]:
            below = children(retrieve_next_token[b], retrieve_next_sibling[b], path[-1])
            wanted = int(target_predict[b, path[-1]])
            right = [child for child in below if int(candidates[b, child]) == wanted]
            if not right:
                break
            path.append(right[0])
        for place, node in enumerate(path):
            at = int(retrieve_index[b, node])
            accept_index[b, place] = at
            predicts[at] = int(target_predict[b, node])
        accept_token_num[b] = len(path) - 1
    return predicts, accept_index, accept_token_num


def tree_speculative_sampling_target_only(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Descend from each root to the child in whose share of the target's distribution a coin
    falls; then draw from what the tried children leave of it."""
    for b in range(len(candidates)):
        path = [0]
        coin = float(uniform_samples[b, 0])
        while len(path) < accept_index.shape[1]:
            node = path[-1]
            tried = 0.0
            for child in children(retrive_next_token[b], retrive_next_sibling[b], node):
                token = int(candidates[b, child])
                p = float(target_probs[b, node, token])
                tried += p
                if p > 0 and (coin < tried / threshold_acc or p >= threshold_single):
                    coin = float(uniform_samples[b, child])
                    path.append(child)
                    break
                draft_probs[b, node, token] = p
            if path[-1] == node:
                break
        for place, node in enumerate(path):
            accept_index[b, place] = int(retrive_index[b, node])
            if place:
                before = int(retrive_index[b, path[place - 1]])
                predicts[before] = int(candidates[b, node])
        accept_token_num[b] = len(path) - 1
        left = target_probs[b, path[-1]]
        if len(path) < accept_index.shape[1]:
            left = (left - draft_probs[b, path[-1]]).clamp_min(0)
        drawn = float(uniform_samples_for_final_sampling[b]) * float(left.sum())
        token = int(torch.searchsorted(left.cumsum(0), drawn, right=True))
        predicts[int(retrive_index[b, path[-1]])] = min(token, len(left) - 1)


def truncated_to(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Return distributions [N, V] truncated to their most probable tokens."""
    order = probs.sort(-1, descending=True).values
    least = order.gather(1, (top_ks.long().clamp(1, probs.shape[-1]) - 1)[:, None])
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def put(eagle_utils: Any) -> None:
    """Put the kernels where SGLang looks them up."""
    eagle_utils.verify_tree_greedy_func = verify_tree_greedy
    eagle_utils.tree_speculative_sampling_target_only = (
        tree_speculative_sampling_target_only
    )
    eagle_utils.top_k_renorm_prob = truncated_to
