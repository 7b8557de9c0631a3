"""Oracles: slow, obvious, written as loops from the definitions. They import nothing from the package."""

from __future__ import annotations

import math

import torch

MODULUS, FACTOR = 2147483647, 73244475


def mix(value: int) -> int:
    value %= MODULUS
    for _ in range(2):
        value = ((value ^ (value >> 16)) * FACTOR) % MODULUS
    return value ^ (value >> 16)


def plan(
    valid: list[list[int]],
    sample_ids: list[int],
    anchors_per_sample: int,
    gamma: int,
    step: int,
    seed: int,
    supervised: list[list[int]] | None = None,
    segments: list[list[int]] | None = None,
    replacement: bool = True,
    partial: bool = False,
) -> list[dict]:
    """
    One dict a block: row, anchor (None if invalid), trunk length, slots that attend, slots with loss.

    Every slot of a valid block attends, as in a served block. Only the loss ends at the text.
    """
    blocks = []
    for row, tokens in enumerate(valid):
        length = len(tokens)

        def usable(
            start: int, position: int, row: int = row, tokens: list[int] = tokens, length: int = length
        ) -> bool:
            if position >= length or not tokens[position]:
                return False
            return segments is None or segments[row][position] == segments[row][start]

        windows = []
        for start in range(length):
            needed = 2 if partial else gamma + 1
            is_window = all(usable(start, start + offset) for offset in range(needed))
            if is_window and supervised is not None:
                is_window = start + 1 < length and bool(supervised[row][start + 1])
            if is_window:
                windows.append(start)
        ids = [17 * sample_ids[row] + 31 * step + 43 * seed + 59 * slot for slot in range(anchors_per_sample)]
        if replacement:
            anchors = [windows[mix(value) % len(windows)] if windows else None for value in ids]
        else:
            order = sorted(range(len(windows)), key=lambda o: (mix(ids[0] + 101 * (o + 1)), o))
            anchors = sorted(windows[o] for o in order[:anchors_per_sample])
            anchors = anchors + [None] * (anchors_per_sample - len(anchors))
        for anchor in anchors:
            slots, with_loss = [], []
            if anchor is not None:
                slots = list(range(gamma + 1))
                for slot in slots[1:]:
                    if not usable(anchor, anchor + slot):
                        break
                    if supervised is not None and not supervised[row][anchor + slot]:
                        break
                    with_loss.append(slot)
            before = (
                0
                if anchor is None
                else sum(
                    1
                    for position in range(anchor)
                    if tokens[position] and (segments is None or segments[row][position] == segments[row][anchor])
                )
            )
            blocks.append({"row": row, "anchor": anchor, "trunk": before, "slots": slots, "loss": with_loss})
    return blocks


def visible(
    blocks: list[dict],
    valid: list[list[int]],
    gamma: int,
    window: int | None = None,
    causal: bool = False,
    segments: list[list[int]] | None = None,
) -> list[list[list[bool]]]:
    """[row][query][key]: keys are the row's context positions, then the slots of the row's blocks in order."""
    rows = []
    for row, tokens in enumerate(valid):
        own_blocks = [block for block in blocks if block["row"] == row]
        matrix = []
        for query_block, block in enumerate(own_blocks):
            for slot in range(gamma + 1):
                line = []
                for position in range(len(tokens)):
                    seen = slot in block["slots"] and position < block["anchor"] and bool(tokens[position])
                    if seen and window is not None:
                        seen = block["anchor"] + slot - position < window
                    if seen and segments is not None:
                        seen = segments[row][position] == segments[row][block["anchor"]]
                    line.append(seen)
                for key_block in range(len(own_blocks)):
                    for key_slot in range(gamma + 1):
                        same = key_block == query_block
                        seen = same and slot in block["slots"] and key_slot in block["slots"]
                        if causal and key_slot > slot:
                            seen = False
                        line.append(seen or (same and key_slot == slot))
                matrix.append(line)
        rows.append(matrix)
    return rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean() + eps)


def rotate(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    size = x.shape[0]
    half = size // 2
    out = torch.empty_like(x)
    for pair in range(half):
        angle = position * theta ** (-2 * pair / size)
        out[pair] = x[pair] * math.cos(angle) - x[pair + half] * math.sin(angle)
        out[pair + half] = x[pair + half] * math.cos(angle) + x[pair] * math.sin(angle)
    return out


def draft_block(
    weights: dict[str, torch.Tensor],
    inputs: torch.Tensor,
    context: torch.Tensor,
    *,
    num_layers: int,
    num_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    eps: float,
    theta: float,
    windows: list[int | None],
    causal: list[bool],
) -> torch.Tensor:
    """One block alone: `inputs` [slots, H] at positions n …, `context` [n, K*H] at positions 0 … n - 1."""
    n, slots = context.shape[0], inputs.shape[0]
    projected = [rms_norm(weights["fc.weight"] @ row, weights["hidden_norm.weight"], eps) for row in context]
    x = list(inputs)
    for layer in range(num_layers):

        def w(name: str, layer: int = layer) -> torch.Tensor:
            return weights[f"layers.{layer}.{name}.weight"]

        normed = [rms_norm(row, w("input_layernorm"), eps) for row in x]
        sources = projected + normed  # key position = index
        attended = []
        for slot in range(slots):
            heads = []
            for head in range(num_heads):
                rows = slice(head * head_dim, (head + 1) * head_dim)
                group = head // (num_heads // num_key_value_heads)
                kv_rows = slice(group * head_dim, (group + 1) * head_dim)
                query = rms_norm((w("self_attn.q_proj") @ normed[slot])[rows], w("self_attn.q_norm"), eps)
                query = rotate(query, n + slot, theta)
                scores, values = [], []
                for position, source in enumerate(sources):
                    if position >= n and causal[layer] and position - n > slot:
                        continue
                    if position < n and windows[layer] is not None and n + slot - position >= windows[layer]:
                        continue
                    key = rms_norm((w("self_attn.k_proj") @ source)[kv_rows], w("self_attn.k_norm"), eps)
                    scores.append(query @ rotate(key, position, theta) / math.sqrt(head_dim))
                    values.append((w("self_attn.v_proj") @ source)[kv_rows])
                shares = torch.stack(scores).softmax(0)
                heads.append(sum(share * value for share, value in zip(shares, values, strict=True)))
            attended.append(w("self_attn.o_proj") @ torch.cat(heads))
        x = [row + update for row, update in zip(x, attended, strict=True)]
        for slot in range(slots):
            m = rms_norm(x[slot], w("post_attention_layernorm"), eps)
            gate = w("mlp.gate_proj") @ m
            x[slot] = x[slot] + w("mlp.down_proj") @ (gate * torch.sigmoid(gate) * (w("mlp.up_proj") @ m))
    return torch.stack([rms_norm(row, weights["norm.weight"], eps) for row in x])


def convolve(
    normed: list[list[float]],
    states: list[list[float]],
    base_kernel: list[list[float]],
    projection: list[list[float]],
    *,
    side: int,
    taps: int,
    group_size: int,
) -> list[list[float]]:
    """Convolve one block: kernel [tap][channel] plus the projection of the slot's normed input for each group."""
    groups = len(states[0]) // group_size
    result = []
    for slot in range(len(states)):
        row = []
        for channel in range(len(states[0])):
            value = 0.0
            for tap in range(taps):
                if slot - tap < 0:
                    continue
                weights = projection[(side * taps + tap) * groups + channel // group_size]
                own = sum(weight * number for weight, number in zip(weights, normed[slot], strict=True))
                value += (base_kernel[tap][channel] + own) * states[slot - tap][channel]
            row.append(value)
        result.append(row)
    return result


def markov_scores(
    kind: str, weights: dict[str, list], tokens: list[int], hidden_states: torch.Tensor
) -> list[list[float]]:
    """Return the scores that a Markov head adds in each slot of one block, whose tokens before are `tokens`."""

    def linear(name: str, inputs: list[float]) -> list[float]:
        rows, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias") or [0.0] * len(weights[f"{name}.weight"])
        return [sum(w * x for w, x in zip(row, inputs, strict=True)) + b for row, b in zip(rows, bias, strict=True)]

    def sigmoid(value: float) -> float:
        return 1 / (1 + math.exp(-value))

    rank = len(weights["markov_w1.weight"][0])
    state, result = [0.0] * rank, []
    for slot, token in enumerate(tokens):
        embedded, hidden = weights["markov_w1.weight"][token], hidden_states[slot].tolist()
        features = embedded
        if kind == "gated":
            gate = linear("gate_proj", hidden + embedded)
            features = [sigmoid(g) * e for g, e in zip(gate, embedded, strict=True)]
        if kind == "rnn":
            parts = linear("joint_proj", state + embedded + hidden)
            features = [math.tanh(value) for value in parts[2 * rank :]]
            state = [
                sigmoid(parts[i]) * state[i] + (1 - sigmoid(parts[i])) * math.tanh(parts[rank + i])
                for i in range(rank)
            ]
        result.append(linear("markov_w2", features))
    return result


def cross_entropy(hidden: torch.Tensor, head: torch.Tensor, labels: list[int]) -> list[torch.Tensor]:
    losses = []
    for row, label in zip(hidden, labels, strict=True):
        logits = head @ row
        losses.append(torch.log(torch.exp(logits - logits.max()).sum()) + logits.max() - logits[label])
    return losses


def softmax(logits: torch.Tensor) -> torch.Tensor:
    exponentials = torch.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def target_terms(
    logits: torch.Tensor, target_logits: torch.Tensor, label: int, top_k: int, temperature: float
) -> dict[str, torch.Tensor]:
    """Each term of one slot, token by token."""
    q, p = softmax(logits), softmax(target_logits)
    soft_q, soft_p = softmax(logits / temperature), softmax(target_logits / temperature)
    best = sorted(range(len(p)), key=lambda token: -target_logits[token].item())[:top_k]
    best_sum = sum(soft_p[token] for token in best)
    return {
        "ce": -torch.log(q[label]),
        "soft": -sum(p[token] * torch.log(q[token]) for token in range(len(p))),
        "l1": sum(abs(q[token] - p[token]) for token in range(len(p))),
        "kl": temperature**2
        * sum(soft_p[token] / best_sum * torch.log(soft_p[token] / best_sum / soft_q[token]) for token in best),
    }


def dpace(cross_entropies: list[float], supervised: list[bool], alpha: float) -> list[float]:
    reach, product = [], 1.0
    for loss, has_loss in zip(cross_entropies, supervised, strict=True):
        if has_loss:
            product *= (1 - alpha) * math.exp(-loss) + alpha
        reach.append(product)
    return [
        sum(reach[later] for later in range(slot, len(reach)) if supervised[later]) if supervised[slot] else 0.0
        for slot in range(len(reach))
    ]


def accepted(correct: list[bool], supervised: list[bool]) -> int:
    count = 0
    for slot in range(1, len(correct)):
        if not (correct[slot] and supervised[slot]):
            break
        count += 1
    return count


def serve(tokens: list[int], first: int, last: int, proposals: list[list[int]], ends: set[int]) -> list[int]:
    """Tokens each pass with a draft commits while the answer `tokens[first … last]` is written."""
    passes = []
    written = [tokens[first]]  # the prefill's
    while len(written) < last - first + 1:
        missing = last - first + 1 - len(written)
        if missing == 1 and tokens[last] not in ends:
            written.append(tokens[last])  # a plain step: the budget leaves no room for a draft
            continue
        before = len(written)
        for proposal in proposals[first + before - 1]:
            if len(written) < last - first + 1 and proposal == tokens[first + len(written)]:
                written.append(proposal)
            else:
                break
        if len(written) < last - first + 1:
            written.append(tokens[first + len(written)])  # the bonus token
        passes.append(len(written) - before)
    return passes


def best_fit_rows(lengths: list[int], capacity: int) -> list[list[int]]:
    """Each document, longest first, into the row with the least room that is enough; of equals, the first to be so."""
    rows: list[dict] = []
    for clock, document in enumerate(sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))):
        best = None
        for row in rows:
            if row["space"] >= lengths[document] and (
                best is None or (row["space"], row["since"]) < (best["space"], best["since"])
            ):
                best = row
        if best is None:
            best = {"space": capacity, "documents": []}
            rows.append(best)
        best["documents"].append(document)
        best["space"] -= lengths[document]
        best["since"] = clock
    return sorted(sorted(row["documents"]) for row in rows)


class SequenceLists:
    """What each sequence of a cache holds, as a dict from column to the last vector written there."""

    def __init__(self, num_sequences: int) -> None:
        self.sequences: list[dict[int, torch.Tensor]] = [{} for _ in range(num_sequences)]

    def write(self, columns: list[list[int]], values: torch.Tensor) -> None:
        for sequence, its_columns in enumerate(columns):
            for index, column in enumerate(its_columns):
                self.sequences[sequence][column] = values[sequence, :, index]

    def keep(self, sequences: list[int]) -> None:
        self.sequences = [self.sequences[sequence] for sequence in sequences]


def chi_square_p_value(counts: list[int], probabilities: list[float]) -> float:
    """Chance of a worse fit by luck; what is expected less than five times is counted together."""
    total = sum(counts)
    statistic, cells, rest_count, rest_expected = 0.0, 0, 0, 0.0
    for count, probability in zip(counts, probabilities, strict=True):
        expected = total * probability
        if probability <= 1e-9:
            if count:
                return 0.0
        elif expected < 5:
            rest_count, rest_expected = rest_count + count, rest_expected + expected
        else:
            statistic += (count - expected) ** 2 / expected
            cells += 1
    if rest_expected >= 5:
        statistic += (rest_count - rest_expected) ** 2 / rest_expected
        cells += 1
    if cells < 2:
        return 1.0
    # the upper tail of a gamma distribution of half as many degrees of freedom
    return torch.special.gammaincc(
        torch.tensor((cells - 1) / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    ).item()


def tree_choices(parents: list[int], ranks: list[int]) -> list[tuple[int, ...]]:
    """Each node of a tree as the ranks that were chosen on the way to it; node 0 is the root."""
    choices: list[tuple[int, ...]] = []
    for node, (parent, rank) in enumerate(zip(parents, ranks, strict=True)):
        choices.append((*choices[parent], rank) if node else ())
    return choices


def tree_tables(choices: list[tuple[int, ...]]) -> dict[str, list]:
    """Depths, ancestors, elder siblings and paths of the nodes of a tree, from their choices."""
    deepest = max(len(choice) for choice in choices)
    tables: dict[str, list] = {"depths": [], "ancestors": [], "elder_siblings": [], "paths": []}
    for choice in choices:
        tables["depths"].append(len(choice))
        ancestors, elders = [], []
        for other in choices:
            ancestors.append(len(other) <= len(choice) and all(a == b for a, b in zip(other, choice, strict=False)))
            is_sibling = len(other) == len(choice) and other[:-1] == choice[:-1] and len(choice) > 0
            elders.append(is_sibling and other[-1] < choice[-1])
        tables["ancestors"].append(ancestors)
        tables["elder_siblings"].append(elders)
        path = [choices.index(choice[:depth]) for depth in range(len(choice) + 1)]
        tables["paths"].append(path + [path[-1]] * (deepest - len(choice)))
    return tables


def best_tree_chances(num_slots: int, num_nodes: int, chances: list[float]) -> list[float]:
    """Chances of the likeliest nodes besides the root, if each rank is right with its chance at every slot."""
    found, level = [], [1.0]
    for _ in range(num_slots - 1):
        level = [before * chance for before in level for chance in chances]
        found += level
    return sorted(found, reverse=True)[: num_nodes - 1]


def tree_walk(parents: list[int], drafted: list[int], chosen: list[int]) -> list[int]:
    """Nodes that are accepted if the target's token after node `i` is `chosen[i]`; `drafted[0]` is of node 1."""
    path, node = [], 0
    while True:
        for child in range(1, len(parents)):
            if parents[child] == node and drafted[child - 1] == chosen[node]:
                path.append(child)
                break
        else:
            return path
        node = path[-1]


def tree_expected(parents: list[int], drafted: list[int], scores: torch.Tensor) -> float:
    """Expected number of committed tokens: 1, and the chance of each node to be reached."""
    expected, reached = 1.0, [1.0]
    for node in range(1, len(parents)):
        reached.append(reached[parents[node]] * softmax(scores[parents[node]])[drafted[node - 1]].item())
        expected += reached[node]
    return expected


def suite_numbers(answers: list[dict], num_slots: int, bin_width: int) -> dict:
    """
    Acceptance of answers, pass by pass.

    Each answer has `passes`: tokens of the answer before the pass, drafted slots verified, tokens committed.
    """
    committed, by_slot, by_count, by_bin = [], [], {}, {}
    for answer in answers:
        for start, _, count in answer["passes"]:
            committed.append(count)
            by_count[count] = by_count.get(count, 0) + 1
            by_bin.setdefault(start // bin_width, []).append(count)
    for slot in range(1, num_slots):
        verified = accepted = 0
        for answer in answers:
            for _, num_verified, count in answer["passes"]:
                if num_verified >= slot:
                    verified += 1
                    if count >= slot + 1:
                        accepted += 1
        by_slot.append(accepted / verified if verified else None)
    num_same, ratios = 0, []
    for answer in answers:
        if answer["plain"] == answer["drafted"]:
            num_same += 1
        ratios.append(len(answer["drafted"]) / answer["drafted_s"] / (len(answer["plain"]) / answer["plain_s"]))
    ratios.sort()
    middle = len(ratios) // 2
    return {
        "accept_len": sum(committed) / len(committed),
        "slots": by_slot,
        "counts": by_count,
        "bins": {number: sum(counts) / len(counts) for number, counts in by_bin.items()},
        "num_same": num_same,
        "median_ratio": ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2,
        "plain_rate": sum(len(answer["plain"]) for answer in answers) / sum(answer["plain_s"] for answer in answers),
    }


def token_row(columns: dict) -> tuple[list[int], list[bool]] | None:
    """The tokens and the mask of a row of tokens, or None if a column must be refused."""
    ids = columns["input_ids"]
    masks = ("loss_mask", "supervised_mask", "completion_mask", "assistant_masks")
    given = [name for name in (*masks, "labels", "attention_mask", "position_ids") if columns.get(name) is not None]
    if any(type(token) is not int for token in ids) or any(len(columns[name]) != len(ids) for name in given):
        return None
    kept_ids, kept_mask, ended, has_begun = [], [], False, False
    for position, token in enumerate(ids):
        is_learned = True
        for name in masks:
            if name in given:
                if columns[name][position] not in (0, 1):
                    return None
                is_learned = is_learned and columns[name][position] == 1
        if "labels" in given:
            label = columns["labels"][position]
            if label not in (-100, token):
                return None
            is_learned = is_learned and label == token
        is_real = True
        if "attention_mask" in given:
            if columns["attention_mask"][position] not in (0, 1):
                return None
            is_real = columns["attention_mask"][position] == 1
        if is_real and ended:
            return None
        ended = ended or (has_begun and not is_real)
        has_begun = has_begun or is_real
        if is_real:
            if "position_ids" in given and columns["position_ids"][position] != len(kept_ids):
                return None
            kept_ids.append(token)
            kept_mask.append(is_learned)
    return kept_ids, kept_mask


def conversation_row(
    messages: list[dict], learned: list[int], render, encode, ends: set[int], is_truncated: bool
) -> tuple[list[int], list[bool]]:
    """
    The tokens and the mask of a conversation, from one render before and one after every learned turn.

    `render(messages, is_prompt)` gives text and `encode` its tokens, one a byte or a special token. The template must
    write contents as they are.
    """
    if not learned:
        ids = encode(render(messages, False))
        return ids, [False] * len(ids)
    turns = []
    for turn in learned:
        prompt = encode(render(messages[:turn], True))
        full = encode(render(messages[: turn + 1], False))
        written = []
        for token in full[len(prompt) :]:
            written.append(token)
            if token in ends:
                break
        turns.append((prompt, full, written))
    prompt, ids, written = turns[-1]
    if is_truncated:
        written = []
        for token in encode(messages[learned[-1]].get("content") or ""):
            if token in ends:
                break
            written.append(token)
        ids = prompt + written
    mask = [len(prompt) <= position < len(prompt) + len(written) for position in range(len(ids))]
    for earlier, _, said in turns[:-1]:
        start = len(earlier)
        equal = 0
        while equal < len(said) and start + equal < len(prompt) and ids[start + equal] == said[equal]:
            equal += 1
        is_whole = equal == len(said) or (equal == len(said) - 1 and said[-1] in ends)
        if ids[:start] == earlier and is_whole:
            for position in range(start, start + equal):
                mask[position] = True
    return ids, mask
