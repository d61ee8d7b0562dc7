// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The gate's code, decoded from each of its bytes: whatever the client does, what it can execute there is harmless.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess,
    Register,
};

#[allow(non_camel_case_types, dead_code, clippy::all)]
mod format {
    include!(concat!(env!("OUT_DIR"), "/format.rs"));
}

const INDICES: [u8; format::TMB_VISIT_BINDINGS as usize] =
    [0x06, 0x07, 0x0e, 0x16, 0x17, 0x1e, 0x1f, 0x27, 0x2f, 0x37, 0x3f, 0x60, 0x61];
/// Where the gate lies, in some GiB.
const GATE: u64 = 0x2000_5000_0000;
const LIST: u64 = GATE - format::TMB_VISIT_GATE as u64 + format::TMB_VISIT_LIST as u64;

/// The gate's page as the host's module writes it (context.c).
fn page(index: u8) -> Vec<u8> {
    let mut page = vec![0xcc; 4096];
    let enter = (format::TMB_VISIT_ENTER_BASE + 8 * u32::from(index)) as usize;
    let exit = enter + format::TMB_VISIT_BETWEEN as usize;
    let code =
        [0xc6, 0x05, 0x16, 0x07, 0x06, 0x06, format::TMB_VISIT_VALID as u8, 0xb1, index, 0x0f, 0x01, 0xd4];
    page[enter..enter + code.len()].copy_from_slice(&code);
    let code = [
        0xc6,
        0x05,
        0x06,
        0x06,
        0x06,
        0x06,
        format::TMB_VISIT_INVALID as u8,
        0x91,
        0x92,
        0x91,
        0x0f,
        0x01,
        0xd4,
    ];
    page[exit..exit + code.len()].copy_from_slice(&code);
    page
}

/// What can happen from one byte on, until control leaves the page or the processor raises an exception.
struct Path {
    /// Stores: target and value.
    stores: Vec<(u64, u64)>,
    /// Instructions between the last store and VMFUNC that write ecx; None: no VMFUNC is reached.
    vmfunc: Option<Vec<Instruction>>,
}

fn follow(page: &[u8], from: usize) -> Path {
    let mut path = Path { stores: Vec::new(), vmfunc: None };
    let mut decoder = Decoder::with_ip(64, &page[from..], GATE + from as u64, DecoderOptions::NONE);
    let mut since_store = Vec::new();
    let mut info = InstructionInfoFactory::new();
    loop {
        let i = decoder.decode();
        if i.code() == Code::INVALID || i.mnemonic() == Mnemonic::Int3 {
            return path;
        }
        if i.mnemonic() == Mnemonic::Vmfunc {
            path.vmfunc = Some(since_store);
            return path;
        }
        assert_eq!(i.flow_control(), FlowControl::Next, "{from:#x}: {:?} at {:#x}", i.mnemonic(), i.ip());
        for memory in info.info(&i).used_memory() {
            assert!(
                memory.access() == OpAccess::Write,
                "{from:#x}: {:?} at {:#x} reads memory",
                i.mnemonic(),
                i.ip()
            );
            assert_eq!(
                (i.mnemonic(), i.memory_base()),
                (Mnemonic::Mov, Register::RIP),
                "{from:#x}: an address of the client's choice"
            );
            assert_eq!(i.memory_size().size(), 1);
            path.stores.push((i.ip_rel_memory_address(), i.immediate(1)));
            since_store.clear();
        }
        since_store.push(i);
    }
}

#[test]
fn from_whatever_byte_a_client_enters_the_gate_reads_nothing_and_stores_only_its_own_two_values() {
    for index in INDICES {
        let page = page(index);
        let entry = LIST + 8 * u64::from(index);
        let mut entries = 0;
        for from in 0..page.len() {
            let path = follow(&page, from);
            for store in &path.stores {
                let values =
                    [format::TMB_VISIT_VALID, format::TMB_VISIT_INVALID].map(|v| (entry, u64::from(v)));
                assert!(values.contains(store), "index {index:#x} from {from:#x}: {store:#x?}");
            }
            if path.stores.iter().any(|s| s.1 == u64::from(format::TMB_VISIT_VALID)) {
                entries += 1;
                // Between the store and VMFUNC stands one instruction, which makes cl the service's index.
                let [.., store, last] = &path.vmfunc.expect("VMFUNC follows at once")[..] else {
                    panic!("two instructions")
                };
                assert_eq!(
                    (last.code(), last.op0_register(), last.immediate8()),
                    (Code::Mov_r8_imm8, Register::CL, index)
                );
                assert_eq!(store.mnemonic(), Mnemonic::Mov);
            }
        }
        assert_eq!(entries, 1, "one way in");
    }
}

#[test]
fn bytes_inside_of_the_gates_instructions_are_none_or_touch_registers_only() {
    for index in INDICES {
        let mut decoder = Decoder::with_ip(64, std::slice::from_ref(&index), 0, DecoderOptions::NONE);
        assert_eq!(decoder.decode().code(), Code::INVALID, "{index:#x}");
    }
    assert_eq!(
        format::TMB_VISIT_ENTER_BASE + 8 * 0x61 + format::TMB_VISIT_BETWEEN + format::TMB_VISIT_EXIT_SIZE,
        0xd08
    );
}
