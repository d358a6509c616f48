"""Copy many short rows between memory addresses, at the speed of the memory: what torch and libc have no call for.

A block of a KV cache lies in pieces, a row of 4 KiB and more in each layer. Three things make such a copy slow, and are
avoided by a loop that is compiled here, once a process (20 ms), by llvmlite:

- A store reads the cache line that it overwrites. Stores past the cache don't: 1.2 to 1.6 times memcpy's speed.
- Each row is a new page, on which the processor's own prefetch begins anew: the next row is fetched into the L2 cache
  while this one is copied (into L1 it would wait for free buffers, and gain nothing).
- A call for each row costs 0.4 us, 4 KiB take that long.

Measured against one memcpy of the same blocks in one piece (`benchmarks.storage`): docs/soak.md.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from collections.abc import Callable

logger = logging.getLogger("raykv")

RowCopy = Callable[[int, int, int, int], object]
"""copy(targets, sources, count, nbytes): the addresses of two arrays of `count` addresses; `nbytes` from each to each.

Rows must not overlap. When it returns, all bytes are visible to other processors."""

_WIDTH = 64  # bytes of a store: a cache line
_TURN = 256  # bytes a turn of the loop
_X86 = platform.machine().lower() in ("x86_64", "amd64")

_CODE = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
{declare_fence}

define void @copy_rows(ptr %targets, ptr %sources, i64 %count, i64 %nbytes) {{
entry:
  %whole = and i64 %nbytes, -{turn}
  %rest = and i64 %nbytes, {turn_mask}
  %final = sub i64 %count, 1
  %none = icmp eq i64 %count, 0
  br i1 %none, label %end, label %row
row:
  %i = phi i64 [0, %entry], [%i_next, %tail]
  %target_at = getelementptr i64, ptr %targets, i64 %i
  %source_at = getelementptr i64, ptr %sources, i64 %i
  %target = load ptr, ptr %target_at
  %source = load ptr, ptr %source_at
  %i_next = add i64 %i, 1
  %is_final = icmp eq i64 %i, %final
  %ahead = select i1 %is_final, i64 %i, i64 %i_next
  %ahead_at = getelementptr i64, ptr %sources, i64 %ahead
  %next_source = load ptr, ptr %ahead_at
  %address = ptrtoint ptr %target to i64
  %odd = and i64 %address, {width_mask}
  %aligned = icmp eq i64 %odd, 0
  %long = icmp ne i64 %whole, 0
  %fast = and i1 %aligned, %long
  br i1 %fast, label %turn, label %slow
slow:
  call void @llvm.memcpy.p0.p0.i64(ptr %target, ptr %source, i64 %nbytes, i1 false)
  br label %tail
turn:
  %o = phi i64 [0, %row], [%o_next, %turn]
{body}
  %o_next = add i64 %o, {turn}
  %more_of_row = icmp ult i64 %o_next, %whole
  br i1 %more_of_row, label %turn, label %last_bytes
last_bytes:
  %target_rest = getelementptr i8, ptr %target, i64 %whole
  %source_rest = getelementptr i8, ptr %source, i64 %whole
  call void @llvm.memcpy.p0.p0.i64(ptr %target_rest, ptr %source_rest, i64 %rest, i1 false)
  br label %tail
tail:
  %more = icmp ult i64 %i_next, %count
  br i1 %more, label %row, label %end
end:
  {fence}
  ret void
}}
!0 = !{{i32 1}}
"""
_LOAD = """
  %o{k} = add i64 %o, {at}
  %from{k} = getelementptr i8, ptr %source, i64 %o{k}
  %next{k} = getelementptr i8, ptr %next_source, i64 %o{k}
  %bytes{k} = load <{width} x i8>, ptr %from{k}, align 1
  call void @llvm.prefetch.p0(ptr %next{k}, i32 0, i32 2, i32 1)"""
_STORE = """
  %to{k} = getelementptr i8, ptr %target, i64 %o{k}
  store <{width} x i8> %bytes{k}, ptr %to{k}, align {width}, !nontemporal !0"""


def _code() -> str:
    parts = range(_TURN // _WIDTH)
    body = "".join(_LOAD.format(k=k, at=k * _WIDTH, width=_WIDTH) for k in parts)
    body += "".join(_STORE.format(k=k, width=_WIDTH) for k in parts)
    return _CODE.format(
        # Stores past the cache are seen by others in any order, up to a fence.
        declare_fence="declare void @llvm.x86.sse.sfence()" if _X86 else "",
        fence="call void @llvm.x86.sse.sfence()" if _X86 else "fence seq_cst",
        turn=_TURN,
        turn_mask=_TURN - 1,
        width_mask=_WIDTH - 1,
        body=body,
    )


@functools.cache
def row_copy() -> RowCopy | None:
    """The compiled loop, which runs without the GIL; None, with a line in the log, where it can't be compiled."""
    try:
        return _compiled()
    except Exception as error:
        logger.warning("rows of KV blocks are copied by memcpy, one call each, which is slower: %s", error)
        return None


def _compiled() -> RowCopy:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    module = llvm.parse_assembly(_code())
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    address = engine.get_function_address("copy_rows")
    prototype = ctypes.CFUNCTYPE(None, *(ctypes.c_size_t,) * 4)
    native = prototype(address)

    def copy(targets: int, sources: int, count: int, nbytes: int) -> object:
        return native(targets, sources, count, nbytes)

    copy.engine = engine  # type: ignore[attr-defined]  # the code lives as long as this does
    return copy
