// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A client in a nested guest of the lab with VMX. It prints a line for each claim; the test outside reads them (main.rs).

mod hostile;

use std::arch::x86_64::_rdtsc;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;
use tombolo_service::vmfunc::{Bound, DEVICE};
use tombolo_service::{Ended, Error, Service, Way};

/// Calls of the example.
const PUT: u32 = 0;
const GET: u32 = 1;
const NOTHING: u32 = 3;
/// Calls of the odd one.
const COUNT: u32 = 0;
const ENDED: u32 = 1;
const LOOPS: u32 = 2;
/// Those that end their visit, up to the last.
const FAULTS: [u32; 13] = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
/// VMX's basic exit reason of CPUID.
const CPUID: u32 = 10;
/// The index of the call that asks the processor.
const ASKS: u32 = 7;
const VMCALL: u32 = 18;
const CALLS_VMCALL: u32 = 9;

const MEASURED: u64 = 1_000_000;

fn claim(what: &str) {
    println!("claim: {what}");
}

/// Binds as soon as the server has admitted this VM.
fn bind(name: &str) -> Bound {
    loop {
        match Bound::new(Path::new(DEVICE), name) {
            Ok(bound) => return bound,
            Err(Error::Refused(why)) => println!("waiting: {why}"),
            Err(e) => panic!("binding to {name}: {e}"),
        }
        thread::sleep(Duration::from_millis(200));
    }
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some("hostile") {
        hostile::enters_everywhere("kv");
        return;
    }
    let mut kv = bind("kv");
    assert_eq!(kv.way(), Way::Vmfunc);
    stores_and_finds(&mut kv);
    let mut odd = bind("odd");
    odd_calls(&mut odd);
    two_clients();
    stores_and_finds(&mut kv);
    let program = std::env::current_exe().expect("a program");
    assert!(Command::new(program).arg("hostile").status().expect("started").success());
    stores_and_finds(&mut kv);
    instructions(&mut kv);
    many_calls(&mut kv);
    hears_of_the_end(&mut odd);
    stores_and_finds(&mut kv);
    println!("begins: the visit that its VM dies in");
    let mut last = bind("last");
    loop {
        let ended = last.call(LOOPS, [0; 3]);
        assert!(matches!(ended, Err(Error::Ended(Ended::TooLong))), "{ended:?}");
    }
}

fn stores_and_finds(kv: &mut Bound) {
    for i in 0..20u32 {
        let key = format!("key {i}");
        kv.window().write(0, key.as_bytes()).expect("it fits");
        kv.window().write(key.len() as u64, &i.to_le_bytes()).expect("it fits");
        assert_eq!(kv.call(PUT, [key.len() as u64, 4, 0]).expect("called"), 0);
    }
    for i in 0..20u32 {
        let key = format!("key {i}");
        kv.window().write(0, key.as_bytes()).expect("it fits");
        assert_eq!(kv.call(GET, [key.len() as u64, 0, 0]).expect("called"), 4);
        let mut value = [0; 4];
        kv.window().read(key.len() as u64, &mut value).expect("inside");
        assert_eq!(u32::from_le_bytes(value), i);
    }
    assert!(matches!(kv.call(9, [0; 3]), Err(Error::NoSuchCall(9))));
    claim("a client stores and finds, and a call that does not exist is an error");
}

fn odd_calls(odd: &mut Bound) {
    let before = odd.call(COUNT, [0; 3]).expect("called");
    for call in FAULTS {
        let result = odd.call(call, [0; 3]);
        println!("call {call}: {result:?}");
        match result {
            Err(Error::Ended(Ended::Exit(CPUID))) => assert_eq!(call, ASKS),
            Err(Error::Ended(Ended::Exit(VMCALL))) => assert_eq!(call, CALLS_VMCALL),
            Err(Error::Ended(Ended::Fault)) => assert!(![ASKS, CALLS_VMCALL].contains(&call)),
            other => panic!("call {call}: {other:?}"),
        }
    }
    let long = odd.call(LOOPS, [0; 3]);
    assert!(matches!(long, Err(Error::Ended(Ended::TooLong))), "{long:?}");
    // Call 14 has counted itself out again.
    let counted = odd.call(COUNT, [0; 3]).expect("called") - before;
    assert_eq!(counted, FAULTS.len() as u64 + 1, "what the visits had stored stays");
    assert_eq!(odd.call(ENDED, [0; 3]).expect("called"), FAULTS.len() as u64 + 1);
    claim("a service that loops, faults or leaves its context ends the visit with an error, and serves on");
}

fn two_clients() {
    let threads: Vec<_> = (0..2u64)
        .map(|n| {
            thread::spawn(move || {
                let mut kv = bind("kv");
                for i in 0..20_000 {
                    assert_eq!(kv.call(NOTHING, [n << 32 | i, 0, 0]).expect("called"), n << 32 | i);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no client fails");
    }
    claim("two clients call at the same time");
}

/// Bochs' time stamp counts instructions. The least of many is a call that nothing interrupted.
fn instructions(kv: &mut Bound) {
    let least = |kv: &mut Bound, calls: u64| {
        let one = |kv: &mut Bound| {
            // SAFETY: it reads a counter.
            let begun = unsafe { _rdtsc() };
            for i in 0..calls {
                assert_eq!(kv.call(NOTHING, [i, 0, 0]).expect("called"), i);
            }
            // SAFETY: as above.
            unsafe { _rdtsc() - begun }
        };
        (0..50).map(|_| one(kv)).min().expect("fifty")
    };
    let (few, many) = (least(kv, 10), least(kv, 30));
    println!("instructions of a call with its Rust caller: {}", (many - few) / 20);
    println!("instructions of a call: {}", hostile::instructions("kv"));
}

fn many_calls(kv: &mut Bound) {
    println!("counts begin");
    thread::sleep(Duration::from_secs(3));
    // SAFETY: it reads a counter.
    let begun = unsafe { _rdtsc() };
    for i in 0..MEASURED {
        assert_eq!(kv.call(NOTHING, [i, 0, 0]).expect("called"), i);
    }
    // SAFETY: as above.
    let took = unsafe { _rdtsc() - begun };
    println!("counts end: {took} instructions");
    thread::sleep(Duration::from_secs(3));
    claim("a million calls");
}

fn hears_of_the_end(odd: &mut Bound) {
    println!("begins: the visit that its server dies in");
    let why = loop {
        match odd.call(LOOPS, [0; 3]) {
            Err(Error::Ended(Ended::TooLong)) => {}
            other => break other,
        }
    };
    assert!(matches!(why, Err(Error::Gone)), "{why:?}");
    claim("a client whose server dies in mid-visit is told that the service is gone");
}
