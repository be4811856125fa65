"""The end of an item: computes the output and the LSE from the sums, with sinks and V's mean, and stores them."""

from __future__ import annotations

from ..common import HIDDEN, LN2, LOG2E
from ..gluon import aggregate, fence_async_shared, gl, gluon, reinterpret, send, send_wait, sync, tensor_descriptor
from ..memory import number
from ..ptx import log2, pin, reciprocal
from .items import BATCH, HEAD, TOKEN, channels_of_mean
from .registers import ENDLESS
from .softmax import WEIGHT_BITS


@aggregate
class PrefillOutput:
    """The addresses of the output and the LSE. With `PrefillOptions.split` they are the parts that `combine` takes."""

    desc: tensor_descriptor | gl.constexpr  # None: by way of `ptr`
    memory: gl.shared_memory_descriptor | gl.constexpr  # [partitions, 1, rows, 1, width], with `desc`
    ptr: gl.tensor | gl.constexpr
    stride_b: gl.tensor  # of batch, token, head, in units of eight elements
    stride_t: gl.tensor
    stride_h: gl.tensor
    lse: gl.tensor | gl.constexpr  # float32, a pointer or None
    sinks: gl.tensor | gl.constexpr  # float32 [num_q_heads], a pointer or None
    num_tokens: gl.tensor
    num_q_heads: gl.tensor
    plane: gl.tensor  # elements of the parts' LSE, behind which are the scores of K's mean

    @gluon.jit
    def send(self, PARTITION: gl.constexpr, batch, token, head, count, y):
        """Store a partition's rows, of which `count` are queries, by TMA. It skips other rows and channels after the
        last.
        """
        SHAPE: gl.constexpr = [y.shape[0], y.shape[1]]
        FLAT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, self.desc.dtype)
        memory = self.memory.index(PARTITION)
        # The threads that sent the item before wait until it has left this memory, and the others wait for them.
        send_wait(0)
        sync()
        reinterpret(memory, self.desc.dtype, SHAPE, FLAT).store(y.to(self.desc.dtype))
        # Each thread makes its writes visible to TMA, before some threads start the copy.
        fence_async_shared()
        sync()
        if len(self.desc.block_type.shape) == 5:  # a ragged batch
            send(self.desc, [ENDLESS, token + count, ENDLESS - count, head, 0], memory)
        else:
            send(self.desc, [batch, token, head, 0], memory)

    @gluon.jit
    def store(self, batch, token, head, count, y, first: gl.constexpr, options: gl.constexpr):
        """Store a partition's rows, of which `count` are queries. `y` has the channels from `first` on."""
        N: gl.constexpr = y.shape[1]
        y = y.to(self.ptr.dtype.element_ty)
        if options.width < 256 and y.dtype.primitive_bitwidth == 16:
            # Whole rows, by way of shared memory, of which head_dim 256 has none left.
            y = gl.convert_layout(y, gl.BlockedLayout([1, 8], [256 // N, N // 8], [gl.num_warps(), 1], [1, 0]))
        row = gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))
        channel = first + gl.arange(0, N, gl.SliceLayout(0, y.type.layout))
        mask = (row < count)[:, None]
        if first + N > options.head_dim:
            mask = mask & (channel < options.head_dim)[None, :]
        # Strides are in units of 16 bytes, so that the compiler knows they are multiples and uses wide stores.
        at = batch.to(gl.int64) * self.stride_b + token.to(gl.int64) * self.stride_t + head.to(gl.int64) * self.stride_h
        ptr = self.ptr + at * 8
        gl.store(ptr + (row * (self.stride_t * 8))[:, None] + channel[None, :], y, mask=mask)


@gluon.jit
def write_channels(rows, output, batch, token, head, count, v_mean, acc, inverse, share, unseen, blind,
                   first: gl.constexpr):  # fmt: skip
    """Store channels of the output, from `first` on: `acc * inverse + v_mean * share`, and zero in rows that saw no
    key.

    Args:
        batch, token, head: the position of the first row.
        share: None: 1.
        unseen, blind: rows that saw no key, and whether there are any (None: not known).
    """
    options: gl.constexpr = rows.OPTIONS
    if first < options.head_dim:
        OUT: gl.constexpr = acc.type.layout
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
        unseen = gl.convert_layout(unseen, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
        y = acc * inverse
        if v_mean is not None:
            v_mean = channels_of_mean(v_mean, first, acc.shape[1], options, gl.SliceLayout(0, OUT))
            if share is not None:
                share = gl.convert_layout(share, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
                y += v_mean[None, :] * share
            else:
                y += v_mean[None, :]
        if blind is None:
            y = gl.where(unseen, 0.0, y)
        elif blind:  # ptxas: volatile moves, or the branch would become the 64 selections that it saves
            y = gl.where(unseen, 0.0, pin(y))
        if output.desc is not None:
            if count > 0:  # TMA cannot store a block whose rows are all before the first
                output.send(rows.PARTITION, batch, token, head, count, y)
        else:
            output.store(batch, token, head, count, y, first, options)


@gluon.jit
def store_item(rows, means, output, acc, m, sums, blind):
    """Write the output and the LSE of a partition's rows. `acc`, `m` and `sums` are the results of `tiles`."""
    options: gl.constexpr = rows.OPTIONS
    items = rows.items
    slot = rows.slot
    ROW: gl.constexpr = m.type.layout
    count = items.count(slot, rows.first)
    head = items.get(slot, HEAD)
    batch = items.get(slot, BATCH)
    token = items.get(slot, TOKEN) + rows.first
    unseen = sums < 1.0  # a largest weight is 2^8; masked ones are 0 or 2^-117, and a sum with a NaN in it is not small
    v_unit = number(items.v_unit.index(slot))
    mean_score = rows.mean_score
    if options.softcap:
        mean_score = mean_score * 0.0  # K's mean is already in the scores
    elif means.USES_K:
        mean_score = rows.queries.mean_score.index(rows.PARTITION).load(ROW)
    if output.sinks is not None:
        sink = gl.load(output.sinks + head).to(gl.float32) * LOG2E - mean_score
        top_m = gl.maximum(m, sink)
        weights = sums * gl.exp2(m - top_m)
        total = weights + gl.exp2(sink - top_m + WEIGHT_BITS)
        inverse = gl.exp2(m - top_m) * v_unit / total
        share = weights / total
        lse = (gl.where(unseen, sink, top_m - WEIGHT_BITS + log2(total)) + mean_score) * LN2
    else:
        inverse = v_unit * reciprocal(sums)
        share: gl.constexpr = None
        lse = gl.where(unseen, HIDDEN, (m - WEIGHT_BITS + log2(sums) + mean_score) * LN2)
    if output.lse is not None:
        row = gl.arange(0, m.shape[0], ROW)
        at = (batch * output.num_tokens + token).to(gl.int64) * output.num_q_heads + head
        if options.split:  # as `combine` takes it
            lse = gl.where(unseen, HIDDEN, m - WEIGHT_BITS + log2(sums))
            mean_scores = output.lse + output.plane.to(gl.int64)
            gl.store(mean_scores + at + row * output.num_q_heads, mean_score, mask=row < count)
        gl.store(output.lse + at + row * output.num_q_heads, lse, mask=row < count)
    if means.v is not None:
        v_mean = means.of_v(items, slot, options)
    else:
        v_mean: gl.constexpr = None
    if options.width == 256:
        N: gl.constexpr = options.width // 4
        for i in gl.static_range(len(acc)):
            write_channels(
                rows, output, batch, token, head, count, v_mean, acc[i], inverse, share, unseen, blind, i * N
            )
    else:
        write_channels(rows, output, batch, token, head, count, v_mean, acc, inverse, share, unseen, blind, 0)
