// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lanes diverge and meet again, wait for each other, exchange values and share memory as CUDA's model says.

mod common;

use common::{Device, Shape, kernel, shape};
use tombolo_cuda_device::machine::block::FaultKind;

/// Runs a body whose result is in %r9, and returns what each thread had.
fn each(body: &str, shape: &Shape) -> Vec<u32> {
    let device = Device::new();
    let threads = (shape.grid * shape.block) as usize;
    let out = device.put(&vec![0u64; threads]);
    let body = format!(
        "{body}\ncvt.u64.u32 %d9, %r9; ld.param.u64 %d1, [p0]; add.u64 %d1, %d1, %o; st.global.u64 [%d1], %d9;"
    );
    device.run(&kernel(1, &body), shape, &[out]).unwrap_or_else(|fault| panic!("{fault:?}"));
    device.get::<u64>(out, threads).into_iter().map(|value| value as u32).collect()
}

fn expect(body: &str, block: u32, expected: impl Fn(u32) -> u32) {
    assert_eq!(each(body, &shape(1, block)), (0..block).map(expected).collect::<Vec<_>>(), "{body}");
}

#[test]
fn threads_of_one_warp_loop_each_for_as_long_as_it_needs() {
    // Collatz: how many steps to 1.
    let body = "add.u32 %r1, %t, 1; mov.u32 %r9, 0;\nAGAIN: setp.eq.u32 %p1, %r1, 1; @%p1 bra DONE; and.b32 %r2, %r1, 1; setp.eq.u32 %p2, %r2, 0; add.u32 %r9, %r9, 1;\n\
                @%p2 bra EVEN; mad.lo.u32 %r1, %r1, 3, 1; bra AGAIN;\nEVEN: shr.u32 %r1, %r1, 1; bra.uni AGAIN;\nDONE:";
    expect(body, 70, |thread| {
        let (mut value, mut steps) = (thread + 1, 0);
        while value != 1 {
            value = if value % 2 == 0 { value / 2 } else { 3 * value + 1 };
            steps += 1;
        }
        steps
    });
}

#[test]
fn a_barrier_holds_the_whole_block_and_shared_memory_is_seen_behind_it() {
    let body = ".shared .align 4 .b32 s[256]; mov.u32 %r1, s; mad.lo.u32 %r2, %t, 4, %r1; setp.lt.u32 %p1, %t, 7; @!%p1 bra STORE;\n\
                mov.u32 %r5, 0;\nSLOW: add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 100; @%p2 bra SLOW;\nSTORE: st.shared.u32 [%r2], %t; bar.sync 0;\n\
                sub.u32 %r3, %n, 1; sub.u32 %r3, %r3, %t; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %r9, [%r3];";
    expect(body, 200, |thread| 199 - thread);
}

#[test]
fn barriers_of_different_numbers_hold_only_those_that_name_them() {
    // Two halves of the block, each with a barrier of its own; the producer arrives at the consumer's.
    let body = ".shared .b32 s[1]; setp.lt.u32 %p1, %t, 32; @%p1 bra CONSUME; setp.eq.u32 %p2, %t, 32; @%p2 st.shared.u32 [s], 77; bar.arrive 1, 64; mov.u32 %r9, 1; bra OUT;\n\
                CONSUME: bar.sync 1, 64; ld.shared.u32 %r9, [s];\nOUT:";
    expect(body, 64, |thread| if thread < 32 { 77 } else { 1 });
}

#[test]
fn bar_red_counts_and_combines_predicates_of_the_block() {
    let body = "setp.lt.u32 %p1, %t, 5; bar.red.popc.u32 %r9, 0, %p1; bar.red.and.pred %p2, 0, !%p1; bar.red.or.pred %p3, 0, %p1; @%p2 add.u32 %r9, %r9, 100; @%p3 add.u32 %r9, %r9, 1000;";
    expect(body, 100, |_| 1005);
}

#[test]
fn shuffles_read_from_the_lane_that_the_mode_names() {
    let shuffle = |what: &str| format!("shfl.sync.{what}, 0xffffffff;");
    expect(&shuffle("down.b32 %r9, %t, 3, 31"), 32, |lane| if lane + 3 < 32 { lane + 3 } else { lane });
    expect(&shuffle("up.b32 %r9, %t, 2, 0"), 32, |lane| if lane >= 2 { lane - 2 } else { lane });
    expect(&shuffle("bfly.b32 %r9, %t, 5, 31"), 64, |lane| lane ^ 5);
    expect(&shuffle("idx.b32 %r9, %t, 9, 31"), 64, |lane| lane / 32 * 32 + 9);
    // Segments of eight lanes: the mask stands above the clamp.
    expect(
        &shuffle("down.b32 %r9|%p1, %t, 1, 0x1807"),
        32,
        |lane| if lane % 8 < 7 { lane + 1 } else { lane },
    );
    let inside = "shfl.sync.up.b32 %r1|%p1, %t, 1, 0, 0xffffffff; selp.u32 %r9, 1, 0, %p1;";
    expect(inside, 32, |lane| u32::from(lane > 0));
}

#[test]
fn votes_and_matches_see_the_lanes_of_the_mask() {
    expect("setp.lt.u32 %p1, %t, 3; vote.sync.ballot.b32 %r9, %p1, 0xffffffff;", 32, |_| 7);
    expect(
        "setp.lt.u32 %p1, %t, 40; vote.sync.all.pred %p2, %p1, 0xffffffff; selp.u32 %r9, 1, 0, %p2;",
        64,
        |thread| u32::from(thread < 32),
    );
    expect(
        "setp.eq.u32 %p1, %t, 40; vote.sync.any.pred %p2, %p1, 0xffffffff; selp.u32 %r9, 1, 0, %p2;",
        64,
        |thread| u32::from(thread >= 32),
    );
    expect("and.b32 %r1, %t, 3; match.any.sync.b32 %r9, %r1, 0xffffffff;", 32, |lane| {
        0x1111_1111 << (lane % 4)
    });
    expect("shr.u32 %r1, %t, 5; match.all.sync.b32 %r9|%p1, %r1, 0xffffffff;", 64, |_| u32::MAX);
    expect("redux.sync.add.u32 %r9, %t, 0xffffffff;", 32, |_| 496);
    expect("sub.u32 %r1, %t, 10; redux.sync.min.s32 %r9, %r1, 0xffffffff;", 32, |_| -10i32 as u32);
}

#[test]
fn a_warp_wide_instruction_waits_for_lanes_that_come_by_another_path() {
    // Odd lanes take a longer way to the same shuffle.
    let body = "and.b32 %r1, %t, 1; setp.eq.u32 %p1, %r1, 1; mov.u32 %r2, %t; @!%p1 bra JOIN; mov.u32 %r3, 0;\nLONG: add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 50; @%p2 bra LONG;\n\
                add.u32 %r2, %r2, 100;\nJOIN: shfl.sync.bfly.b32 %r9, %r2, 1, 31, 0xffffffff;";
    expect(body, 32, |lane| if lane % 2 == 0 { lane + 101 } else { lane - 1 });
}

#[test]
fn activemask_tells_who_is_here() {
    let body = "setp.lt.u32 %p1, %t, 12; mov.u32 %r9, 0; @!%p1 bra OUT; activemask.b32 %r9;\nOUT:";
    expect(body, 32, |lane| if lane < 12 { 0xfff } else { 0 });
}

#[test]
fn a_lane_may_spin_on_a_lock_that_another_lane_of_its_warp_holds() {
    let body = ".shared .b32 lock[1]; .shared .b32 sum[1]; \nTRY: atom.shared.cas.b32 %r1, [lock], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra TRY;\n\
                ld.shared.u32 %r2, [sum]; add.u32 %r2, %r2, 1; st.shared.u32 [sum], %r2; atom.shared.exch.b32 %r3, [lock], 0; bar.sync 0; ld.shared.u32 %r9, [sum];";
    expect(body, 64, |_| 64);
}

#[test]
fn atomics_of_all_kinds_return_the_old_value() {
    let device = Device::new();
    let cell = device.put(&[10u32, 0, 0xff, 5, 5, 7, 3, 0]);
    let real = device.put(&[1.5f32]);
    let body = "ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; red.global.add.u32 [%d1], 1; red.global.max.u32 [%d1+4], %c; red.global.and.b32 [%d1+8], 0xf0; atom.global.inc.u32 %r1, [%d1+12], 9;\n\
                red.global.min.s32 [%d1+16], -3; atom.global.dec.u32 %r2, [%d1+20], 7; red.global.xor.b32 [%d1+24], 1; red.global.add.f32 [%d2], 0f3F000000;";
    device.run(&kernel(2, body), &shape(8, 256), &[cell, real]).expect("a run");
    let threads = 8 * 256;
    assert_eq!(
        device.get::<u32>(cell, 7),
        [10 + threads, threads - 1, 0xf0, (5 + threads) % 10, -3i32 as u32, 7 - threads % 8, 3]
    );
    assert_eq!(device.get::<f32>(real, 1), [1.5 + 0.5 * threads as f32]);
}

#[test]
fn functions_recurse_and_are_called_by_address() {
    let text = ".version 8.8\n.target sm_90\n.address_size 64\n\
        .func (.param .b32 out) fib(.param .b32 n)\n{ .reg .b32 %r<9>; .reg .pred %p<2>; ld.param.u32 %r1, [n]; setp.lt.u32 %p1, %r1, 2; @%p1 bra LEAF;\n\
        sub.u32 %r2, %r1, 1; { .param .b32 a; .param .b32 v; st.param.b32 [a], %r2; call.uni (v), fib, (a); ld.param.b32 %r3, [v]; }\n\
        sub.u32 %r2, %r1, 2; { .param .b32 a; .param .b32 v; st.param.b32 [a], %r2; call.uni (v), fib, (a); ld.param.b32 %r4, [v]; }\n\
        add.u32 %r1, %r3, %r4;\nLEAF: st.param.b32 [out], %r1; ret; }\n\
        .func (.param .b32 out) twice(.param .b32 n)\n{ .reg .b32 %r<9>; ld.param.u32 %r1, [n]; add.u32 %r1, %r1, %r1; st.param.b32 [out], %r1; ret; }\n\
        .global .align 8 .u64 table[2] = {fib, twice};\n\
        .visible .entry k(.param .u64 p0)\n{ .reg .b32 %r<9>; .reg .b64 %d<9>; mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 1; mul.wide.u32 %d1, %r2, 8; mov.u64 %d2, table; add.u64 %d2, %d2, %d1;\n\
        ld.global.u64 %d3, [%d2]; { .param .b32 a; .param .b32 v; st.param.b32 [a], %r1; proto: .callprototype (.param .b32 _) _ (.param .b32 _); call (v), %d3, (a), proto; ld.param.b32 %r3, [v]; }\n\
        mul.wide.u32 %d4, %r1, 4; ld.param.u64 %d5, [p0]; add.u64 %d5, %d5, %d4; st.global.u32 [%d5], %r3; ret; }";
    let device = Device::new();
    let out = device.put(&[0u32; 16]);
    device.run(text, &shape(1, 16), &[out]).unwrap_or_else(|fault| panic!("{fault:?}"));
    fn fib(n: u32) -> u32 {
        if n < 2 { n } else { fib(n - 1) + fib(n - 2) }
    }
    assert_eq!(
        device.get::<u32>(out, 16),
        (0..16).map(|n| if n % 2 == 0 { fib(n) } else { 2 * n }).collect::<Vec<_>>()
    );
}

#[test]
fn local_memory_is_each_threads_own_also_by_generic_addresses() {
    let body = ".local .align 8 .b8 depot[64]; mov.u64 %d2, depot; cvta.local.u64 %d3, %d2; st.u32 [%d3+12], %t; st.local.u32 [depot+16], 5; ld.local.u32 %r1, [%d2+12]; ld.u32 %r2, [%d3+16]; add.u32 %r9, %r1, %r2;";
    expect(body, 64, |thread| thread + 5);
}

#[test]
fn vectors_are_loaded_and_stored_together() {
    let device = Device::new();
    let data = device.put(&[1.0f32, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]);
    let body = "ld.param.u64 %d1, [p0]; ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%d1]; st.global.v2.f32 [%d1+16], {%f4, %f3}; st.global.v2.f32 [%d1+24], {%f2, %f1};";
    device.run(&kernel(1, body), &shape(1, 1), &[data]).expect("a run");
    assert_eq!(device.get::<f32>(data, 8), [1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0]);
}

#[test]
fn dynamic_shared_memory_lies_behind_the_static() {
    let text = kernel(
        1,
        ".shared .align 4 .b32 fixed[4]; mov.u32 %r1, fixed[0]; mov.u32 %r2, dyn; sub.u32 %r9, %r2, %r1; st.shared.u32 [dyn+28], %r9; ld.shared.u32 %r3, [dyn+28]; \
                          ld.param.u64 %d1, [p0]; st.global.u32 [%d1], %r3;",
    );
    let text = text.replace(".visible", ".extern .shared .align 16 .b8 dyn[];\n.visible");
    let device = Device::new();
    let out = device.put(&[0u32]);
    device.run(&text, &Shape { shared: 32, ..shape(1, 1) }, &[out]).expect("a run");
    assert!(device.get::<u32>(out, 1)[0] >= 16);
    let fault = device.run(&text, &Shape { shared: 16, ..shape(1, 1) }, &[out]).expect_err("beyond the end");
    assert_eq!(fault.kind, FaultKind::IllegalAddress);
}

#[test]
fn blocks_of_a_cooperative_launch_wait_for_each_other() {
    let device = Device::new();
    let cells = device.put(&[0u32; 16]);
    let body = "ld.param.u64 %d1, [p0]; red.global.add.u32 [%d1], 1;\nSPIN: ld.volatile.global.u32 %r1, [%d1]; setp.lt.u32 %p1, %r1, 96; @%p1 bra SPIN;\n\
                mov.u32 %r2, %ctaid.x; mul.wide.u32 %d2, %r2, 4; add.u64 %d2, %d2, %d1; st.global.u32 [%d2+4], %r1;";
    device.run(&kernel(1, body), &Shape { cooperative: true, ..shape(3, 32) }, &[cells]).expect("a run");
    assert_eq!(device.get::<u32>(cells, 4), [96; 4]);
}

#[test]
fn printf_formats_its_buffer_as_c_does() {
    let text = kernel(
        0,
        ".local .align 8 .b8 depot[32]; mov.u64 %d1, depot; cvta.local.u64 %d1, %d1; st.u32 [%d1], -7; st.u64 [%d1+8], 0d4004000000000000; mov.u64 %d2, word; st.u64 [%d1+16], %d2; \
         mov.u64 %d2, text; { .param .b64 a; .param .b64 b; .param .b32 v; st.param.b64 [a], %d2; st.param.b64 [b], %d1; call.uni (v), vprintf, (a, b); ld.param.b32 %r1, [v]; }",
    );
    let head = ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n.global .align 1 .b8 text[15] = {37, 48, 52, 100, 32, 37, 46, 50, 102, 32, 37, 115, 37, 37, 0};\n\
                .global .align 1 .b8 word[3] = {104, 105, 0};\n.visible";
    let device = Device::new();
    device.run(&text.replace(".visible", head), &shape(1, 1), &[]).expect("a run");
    assert_eq!(device.printed.into_inner().expect("no panic"), b"-007 2.50 hi%");
}

#[test]
fn wild_addresses_deadlocks_and_traps_are_faults_that_name_the_line() {
    let device = Device::new();
    let fault = |body: &str, block| device.run(&kernel(0, body), &shape(1, block), &[]).expect_err(body);
    assert_eq!(fault("mov.u64 %d1, 64; ld.global.u32 %r1, [%d1];", 1).kind, FaultKind::IllegalAddress);
    assert_eq!(
        fault("mov.u64 %d1, 4; cvta.shared.u64 %d1, %d1; st.u32 [%d1+1000000], 1;", 1).kind,
        FaultKind::IllegalAddress
    );
    assert_eq!(fault(".shared .b32 s[4]; ld.shared.u32 %r1, [s+2];", 1).kind, FaultKind::Misaligned);
    assert_eq!(fault("trap;", 1).kind, FaultKind::Trap);
    assert_eq!(
        fault("setp.eq.u32 %p1, %t, 0; @%p1 bra A; bar.sync 1, 64; A: bar.sync 2, 64;", 32).kind,
        FaultKind::Deadlock
    );
    let unsupported = fault("tcgen05.shift.cta_group::1.down [%r1];", 1);
    assert_eq!(unsupported.kind, FaultKind::Unsupported);
    assert!(unsupported.message.contains("line 8: tcgen05.shift"), "{}", unsupported.message);
}

/// Freed memory is no longer a kernel's.
#[test]
fn memory_that_was_freed_is_out_of_bounds() {
    let device = Device::new();
    let cell = device.put(&[1u32]);
    let body = "ld.param.u64 %d1, [p0]; ld.global.u32 %r1, [%d1];";
    device.run(&kernel(1, body), &shape(1, 1), &[cell]).expect("allocated");
    device.arena.release(cell);
    assert_eq!(
        device.run(&kernel(1, body), &shape(1, 1), &[cell]).expect_err("freed").kind,
        FaultKind::IllegalAddress
    );
}

/// Each lane's fragments are built by the ISA's own formulas (§9.7.14.5.8).
#[test]
fn a_warp_multiplies_matrices_of_halves() {
    let device = Device::new();
    let a: Vec<half::f16> = (0..16 * 16).map(|at| half::f16::from_f32((at % 7) as f32 - 3.0)).collect();
    let b: Vec<half::f16> = (0..16 * 8).map(|at| half::f16::from_f32((at % 5) as f32 * 0.5)).collect();
    let (pa, pb, out) = (device.put(&a), device.put(&b), device.put(&[0f32; 16 * 8]));
    // A by rows; B by columns, so that pairs along k are words.
    let body = "shr.u32 %r1, %t, 2; and.b32 %r2, %t, 3; ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; ld.param.u64 %d3, [p2];\n\
        mad.lo.u32 %r3, %r1, 32, 0; mad.lo.u32 %r3, %r2, 4, %r3; cvt.u64.u32 %d4, %r3; add.u64 %d4, %d4, %d1;\n\
        ld.global.b32 %r10, [%d4]; ld.global.b32 %r11, [%d4+256]; ld.global.b32 %r12, [%d4+16]; ld.global.b32 %r13, [%d4+272];\n\
        cvt.u64.u32 %d4, %r3; add.u64 %d4, %d4, %d2; ld.global.b32 %r14, [%d4]; ld.global.b32 %r15, [%d4+16]; mov.f32 %f5, 0f00000000;\n\
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1,%f2,%f3,%f4}, {%r10,%r11,%r12,%r13}, {%r14,%r15}, {%f5,%f5,%f5,%f5};\n\
        mad.lo.u32 %r3, %r1, 32, 0; mad.lo.u32 %r3, %r2, 8, %r3; cvt.u64.u32 %d4, %r3; add.u64 %d4, %d4, %d3; st.global.v2.f32 [%d4], {%f1,%f2}; st.global.v2.f32 [%d4+256], {%f3,%f4};";
    device.run(&kernel(3, body), &shape(1, 32), &[pa, pb, out]).unwrap_or_else(|fault| panic!("{fault:?}"));
    let expected: Vec<f32> = (0..16 * 8)
        .map(|at| (0..16).map(|k| a[at / 8 * 16 + k].to_f32() * b[at % 8 * 16 + k].to_f32()).sum())
        .collect();
    assert_eq!(device.get::<f32>(out, 16 * 8), expected);
}
