// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Front-ends that try to block the switch, and the sandboxed program, which must keep serving the others.

mod common;

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use common::lab::{hung_up, message};
use common::namespace::alone;
use common::never::Never;
use common::program::Switch;
use common::{Rig, frame, wait_for};
use rustix::process::Rlimit;
use tombolo_net::control::socket::{Request, ask};
use tombolo_net_driver::{Nic, NicConfig};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vmm_sys_util::eventfd::EventFd;

/// The second region's address in guest and front-end.
const SECOND: u64 = 0x7000_0000_0000;

impl Switch {
    /// One more port, for the guest that owns [`Rig::mac`] of `n`, and the guest.
    fn another(&self, n: usize) -> Nic {
        let socket = self.dir.path().join(format!("vm{n}"));
        let port = serde_json::json!({ "name": format!("vm{n}"), "socket": socket, "macs": [Rig::mac(n)] });
        let port = serde_json::from_value(port).unwrap();
        ask::<serde_json::Value>(&self.control(), &Request::Add { port }).unwrap();
        let mut nic = Nic::new(NicConfig::default()).unwrap();
        nic.connect(&socket).unwrap();
        nic
    }
}

/// Shares `file` as one more region of `nic`'s memory.
fn share(nic: &mut Nic, file: &File, size: u64) {
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: SECOND,
        memory_size: size,
        userspace_addr: SECOND,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    nic.front().unwrap().add_mem_region(&region).unwrap();
}

/// Makes a frame available that lies in the second region.
fn send_from_there(nic: &mut Nic) {
    nic.tx.add(&nic.ram, &[(SECOND, 100)], false, None).unwrap();
    nic.kicks[1].raise();
}

fn exchange(from: &mut Nic, to: &mut Nic, n: u8) {
    let sent = frame(Rig::mac(2), Rig::mac(1), 100, n);
    assert!(from.send(&sent));
    assert_eq!(wait_for("a frame between others", || to.receive()).1, sent);
}

#[test]
fn pages_that_never_come_stop_only_the_port_that_handed_them_over() {
    alone("pages_that_never_come_stop_only_the_port_that_handed_them_over", || {
        let switch = Switch::start(0, &[]);
        let (mut b, mut c) = (switch.another(1), switch.another(2));
        let mut hostile = switch.guest(0);
        // Ends first, so that a switch that waits for a page can be killed.
        let never = Never::new(1 << 20);
        share(&mut hostile, &never.open(), 1 << 20);
        exchange(&mut b, &mut c, 1);
        send_from_there(&mut hostile);
        wait_for("the stop of its port", || switch.log().contains("port is stopped").then_some(()));
        exchange(&mut b, &mut c, 2);
        assert!(switch.log().contains("is a file that is no memory"), "{}", switch.log());
    });
}

#[test]
fn an_interrupt_that_its_front_end_makes_wait_holds_up_no_other_port() {
    let switch = Switch::start(0, &[]);
    let (mut b, mut c) = (switch.another(1), switch.another(2));
    let hostile = switch.guest(0);
    for call in &hostile.calls {
        // It is full, so a write to it blocks.
        call.clear();
        call.to_file().unwrap().write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        rustix::fs::fcntl_setfl(call.to_file().unwrap(), rustix::fs::OFlags::empty()).unwrap();
    }
    assert!(b.send(&frame(Rig::mac(0), Rig::mac(1), 100, 0)));
    exchange(&mut b, &mut c, 1);
    // The port continues without interrupts, and can be removed.
    wait_for("the frame", || hostile.peek_used().then_some(()));
    ask::<serde_json::Value>(&switch.control(), &Request::Remove { name: "vm".into() }).unwrap();
    exchange(&mut b, &mut c, 2);
}

/// Makes the interrupts of `nic` wait: they are full, so a write to one blocks.
fn fill(nic: &Nic) {
    for call in &nic.calls {
        call.clear();
        call.to_file().unwrap().write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        rustix::fs::fcntl_setfl(call.to_file().unwrap(), rustix::fs::OFlags::empty()).unwrap();
    }
}

/// Returns whether `nic` is interrupted by a new eventfd for a frame from `b`. Afterwards the switch has done all that it does for
/// that frame.
fn is_interrupted(nic: &mut Nic, b: &mut Nic, c: &mut Nic) -> bool {
    let call = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    nic.front().unwrap().set_vring_call(0, &call).unwrap();
    // The switch writes to a new eventfd once, since it may have had frames before.
    call.read().unwrap();
    while nic.receive().is_some() {}
    let _used_already = nic.rx.want_signal(&nic.ram);
    assert!(b.send(&frame(Rig::mac(0), Rig::mac(1), 100, 0)));
    wait_for("the frame", || nic.peek_used().then_some(()));
    exchange(b, c, 1);
    b.reap();
    exchange(b, c, 2);
    b.reap();
    call.read().is_ok()
}

#[test]
fn a_front_end_that_makes_interrupts_wait_gets_none_on_any_queue_until_it_connects_anew() {
    let switch = Switch::start(0, &[]);
    let (mut b, mut c) = (switch.another(1), switch.another(2));
    let mut hostile = switch.guest(0);
    assert!(is_interrupted(&mut hostile, &mut b, &mut c));
    // The worker waits for the interrupt of the queue that it sends on.
    fill(&hostile);
    assert!(hostile.send(&frame(Rig::mac(1), Rig::mac(0), 100, 0)));
    wait_for("its frame", || b.receive());
    exchange(&mut b, &mut c, 1);
    for _ in 0..3 {
        assert!(!is_interrupted(&mut hostile, &mut b, &mut c), "one more that the worker may wait for");
    }
    drop(hostile);
    let mut next = switch.guest(0);
    assert!(is_interrupted(&mut next, &mut b, &mut c));
    assert!(switch.log().contains("interrupts"), "{}", switch.log());
}

#[test]
fn a_kick_whose_poll_waits_is_refused_and_holds_up_no_port() {
    alone("a_kick_whose_poll_waits_is_refused_and_holds_up_no_port", || {
        let switch = Switch::start(0, &[]);
        let (mut b, mut c) = (switch.another(1), switch.another(2));
        let mut hostile = switch.guest(0);
        // A set of descriptors, which polls those that were ready.
        let never = Never::polled_once(1 << 20);
        let set = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
        let (file, readable) = (never.open(), rustix::event::epoll::EventFlags::IN);
        let data = rustix::event::epoll::EventData::new_u64(0);
        rustix::event::epoll::add(&set, &file, data, readable).unwrap();
        // SAFETY: a descriptor of our own, handed over.
        let kick = unsafe { EventFd::from_raw_fd(set.into_raw_fd()) };
        let refused = hostile.front().unwrap().set_vring_kick(1, &kick).is_err();
        // The workers have adopted all changes before a new port is there.
        let _another = switch.another(3);
        exchange(&mut b, &mut c, 1);
        assert!(refused);
        assert!(switch.log().contains("is not an eventfd"), "{}", switch.log());
    });
}

/// Makes a memfd of `size` bytes.
fn memfd(size: u64) -> File {
    // SAFETY: a new descriptor of our own.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"ram".as_ptr(), libc::MFD_CLOEXEC)) };
    file.set_len(size).unwrap();
    file
}

/// A guest that shares regions of these sizes besides its memory, unless the switch refuses one.
fn sharing(switch: &Switch, file: &File, sizes: &[u64]) -> Option<Nic> {
    let mut nic = switch.guest(0);
    let mut at = 1 << 60;
    for size in sizes {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: at,
            memory_size: *size,
            userspace_addr: at,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        nic.front().unwrap().add_mem_region(&region).ok()?;
        at += size;
    }
    Some(nic)
}

#[test]
fn a_front_end_that_shares_more_memory_than_there_is_keeps_others_from_sharing_none() {
    let switch = Switch::start(0, &[]);
    let file = memfd(1 << 46);
    // As much as the switch takes, in pieces of half the size each time.
    let mut sizes = Vec::new();
    for size in (12..=46).rev().map(|bits| 1u64 << bits) {
        while sizes.len() < 120 {
            let more = [&sizes[..], &[size]].concat();
            if sharing(&switch, &file, &more).is_none() {
                break;
            }
            sizes = more;
        }
    }
    let hostile = sharing(&switch, &file, &sizes).unwrap();
    let (mut b, mut c) = (switch.another(1), switch.another(2));
    exchange(&mut b, &mut c, 1);
    drop(hostile);
    assert!(switch.log().contains("more than"), "{}", switch.log());
}

/// Lets a process open no descriptors from now on but `more`.
fn limit_descriptors(pid: u32, more: u64) {
    let is_free = |n: &u64| !std::path::Path::new(&format!("/proc/{pid}/fd/{n}")).is_symlink();
    let current = Some((0..).find(is_free).unwrap() + more);
    let pid = rustix::process::Pid::from_raw(pid as i32);
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    rustix::process::prlimit(pid, rustix::process::Resource::Nofile, Rlimit { current, ..limit }).unwrap();
}

#[test]
fn a_front_end_that_takes_all_descriptors_holds_up_no_port() {
    let switch = Switch::start(0, &["--user", "root"]);
    let (mut b, mut c) = (switch.another(1), switch.another(2));
    let mut hostile = switch.guest(0);
    exchange(&mut b, &mut c, 1);
    limit_descriptors(switch.child.id(), 0);
    for on in [false, true, false] {
        // The workers adopt each change.
        hostile.front().unwrap().set_vring_enable(1, on).unwrap();
        b.front().unwrap().set_vring_enable(1, !on).unwrap();
        b.front().unwrap().set_vring_enable(1, true).unwrap();
        exchange(&mut b, &mut c, 2);
    }
    assert!(!switch.log().contains("ended"), "{}", switch.log());
    limit_descriptors(switch.child.id(), 100);
    drop(hostile);
    let mut next = switch.guest(0);
    let sent = frame(Rig::mac(0), Rig::mac(1), 90, 3);
    assert!(b.send(&sent));
    assert_eq!(wait_for("a frame for the next guest", || next.receive()).1, sent);
}

#[test]
fn a_front_end_that_connects_when_too_few_descriptors_are_left_can_connect_later() {
    let switch = Switch::start(0, &["--user", "root"]);
    let socket = switch.dir.path().join("vm");
    // The last thread that a switch starts runs, and those of earlier answers, which hold descriptors, have ended.
    let tasks = format!("/proc/{}/task", switch.child.id());
    wait_for("the end of its start and of answers", || {
        let name = |t: std::fs::DirEntry| std::fs::read_to_string(t.path().join("comm")).ok();
        let names: Vec<_> = std::fs::read_dir(&tasks).unwrap().flatten().filter_map(name).collect();
        let has = |name: &str| names.iter().any(|n| n.trim_end() == name);
        (has("net-link") && !has("net-answer")).then_some(())
    });
    // The call that waits for a connection has a descriptor already; there is none for the duplicate that the switch makes.
    limit_descriptors(switch.child.id(), 0);
    hung_up(&UnixStream::connect(&socket).unwrap());
    limit_descriptors(switch.child.id(), 100);
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    const GET_FEATURES: u32 = 1;
    message(&stream, GET_FEATURES, &[], &[]);
    stream.read_exact(&mut [0; 20]).expect("an answer");
    drop(stream);
    drop(switch.guest(0));
}

/// One message of many, chosen by `choice`, about queue `queue`.
fn say_something(nic: &mut Nic, choice: u32, queue: usize, n: u16) -> Result<(), vhost::Error> {
    let memory = VhostUserMemoryRegionInfo {
        guest_phys_addr: nic.ram.gpa(),
        memory_size: nic.ram.size(),
        userspace_addr: nic.ram.user(),
        mmap_offset: 0,
        mmap_handle: nic.ram.file().as_raw_fd(),
    };
    let features = nic.features();
    let event = EventFd::new(0).unwrap();
    let front = nic.front().unwrap();
    match choice % 12 {
        0 | 1 => front.set_vring_enable(queue, n & 1 == 0),
        2 => front.get_vring_base(queue).map(drop),
        3 => front.set_vring_num(queue, [64, 32, 0, 3, u16::MAX][usize::from(n) % 5]),
        4 => front.set_features(features),
        5 => front.set_features(features & !(1 << 15)),
        6 | 7 => front.set_mem_table(&[memory]),
        8 => front.set_vring_base(queue, n),
        9 => front.set_vring_call(queue, &event),
        10 => front.set_vring_kick(queue, &event),
        _ => front.reset_owner(),
    }
}

#[test]
fn whatever_a_front_end_says_in_whatever_order_others_go_on_and_so_can_its_successor() {
    let switch = Switch::start(0, &[]);
    let (mut b, mut c) = (switch.another(1), switch.another(2));
    let mut said = 0;
    for seed in 0..40u32 {
        let mut random = seed.wrapping_mul(0x9e37_79b9) | 1;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            random
        };
        let mut nic = switch.guest(0);
        for step in 0..60 {
            let (choice, queue, n) = (next() >> 3, next() as usize % 2, next() as u16);
            if !b.send(&frame(Rig::mac(0), Rig::mac(1), 100, step)) {
                b.reap();
            }
            nic.send(&frame(Rig::mac(1), Rig::mac(0), 100, step));
            while b.receive().is_some() {}
            // A refused message ends the connection.
            if say_something(&mut nic, choice, queue, n).is_err() {
                break;
            }
            said += 1;
        }
        drop(nic);
        let own = |f: &Vec<u8>| f[6..12] == Rig::mac(1).0;
        let sent = frame(Rig::mac(2), Rig::mac(1), 100, seed as u8);
        wait_for("room to send", || b.send(&sent).then_some(()));
        wait_for("a frame between others", || c.receive().map(|r| r.1).filter(own).filter(|f| *f == sent));
    }
    assert!(said > 200, "{said} messages were taken");
    let mut nic = switch.guest(0);
    while b.receive().is_some() {}
    let sent = frame(Rig::mac(1), Rig::mac(0), 100, 99);
    assert!(nic.send(&sent));
    wait_for("its successor's frame", || b.receive().map(|r| r.1).filter(|f| *f == sent));
}

#[test]
fn a_log_that_is_full_or_that_nobody_reads_holds_up_no_port() {
    // A full pipe, whose reader lives.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let mut writer = File::from(writer);
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK).unwrap();
    while writer.write(&[b'x'; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::empty()).unwrap();
    let full = File::options().write(true).open("/dev/full").unwrap();
    for log in [std::process::Stdio::from(full), writer.into()] {
        let switch = Switch::start_in(tempfile::tempdir().unwrap(), 0, &[], log);
        let mut b = switch.another(1);
        // Front-ends that connect, break their rings and leave: log lines each time.
        for _ in 0..3 {
            let mut hostile = switch.guest(0);
            hostile.tx.add(&hostile.ram, &[(1 << 50, 100)], false, None).unwrap();
            hostile.kicks[1].raise();
        }
        let mut c = switch.another(2);
        exchange(&mut b, &mut c, 3);
    }
    drop(reader);
}

#[test]
fn memory_is_taken_from_memfds_sealed_or_not_and_from_files_in_dev_shm() {
    let switch = Switch::start(0, &[]);
    let mut c = switch.another(2);
    // SAFETY: new descriptors of our own.
    let memfd = || unsafe {
        File::from_raw_fd(libc::memfd_create(c"ram".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING))
    };
    let sealed = memfd();
    sealed.set_len(1 << 20).unwrap();
    // SAFETY: a descriptor of our own.
    assert_eq!(unsafe { libc::fcntl(sealed.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) }, 0);
    let (open, shm) = (memfd(), tempfile::tempfile_in("/dev/shm").unwrap());
    for (n, file) in [sealed, open, shm].into_iter().enumerate() {
        file.set_len(1 << 20).unwrap();
        let sent = frame(Rig::mac(2), Rig::mac(0), 88, n as u8);
        std::os::unix::fs::FileExt::write_all_at(&file, &[&[0; 12], &sent[..]].concat(), 0).unwrap();
        let mut guest = switch.guest(0);
        share(&mut guest, &file, 1 << 20);
        send_from_there(&mut guest);
        assert_eq!(wait_for("the frame", || c.receive()).1, sent);
    }
}

#[test]
fn memory_that_is_cut_short_later_stops_only_its_port() {
    let switch = Switch::start(0, &[]);
    let (mut b, mut c) = (switch.another(1), switch.another(2));
    let mut hostile = switch.guest(0);
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(1 << 20).unwrap();
    share(&mut hostile, &file, 1 << 20);
    file.set_len(0).unwrap();
    send_from_there(&mut hostile);
    wait_for("the stop of its port", || switch.log().contains("took its memory away").then_some(()));
    exchange(&mut b, &mut c, 1);
}

/// Tells the switch to end, and waits until it has.
fn ends(mut switch: Switch) {
    // SAFETY: a signal to a child that was not waited for.
    assert_eq!(unsafe { libc::kill(switch.child.id() as i32, libc::SIGTERM) }, 0);
    let status = wait_for("the end", || switch.child.try_wait().unwrap());
    assert!(status.success(), "{status}: {}", switch.log());
}

#[test]
fn a_front_end_that_stops_in_the_middle_of_a_message_holds_up_neither_its_removal_nor_the_end() {
    let switch = Switch::start(0, &[]);
    let silent = |n: usize| {
        let socket = switch.dir.path().join(format!("silent{n}"));
        let port =
            serde_json::json!({ "name": format!("silent{n}"), "socket": socket, "macs": [Rig::mac(n)] });
        let port = serde_json::from_value(port).unwrap();
        ask::<serde_json::Value>(&switch.control(), &Request::Add { port }).unwrap();
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.write_all(&[1, 0, 0, 0]).unwrap();
        wait_for("its connection", || {
            (switch.port(&format!("silent{n}"))?["connected"] == true).then_some(())
        });
        stream
    };
    let mut removed = silent(1);
    ask::<serde_json::Value>(&switch.control(), &Request::Remove { name: "silent1".into() }).unwrap();
    assert_eq!(removed.read(&mut [0]).unwrap(), 0);
    let mut ended = silent(2);
    ends(switch);
    assert_eq!(ended.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_front_end_that_takes_no_answers_holds_up_neither_its_removal_nor_the_end() {
    let switch = Switch::start(0, &[]);
    let mut stream = UnixStream::connect(switch.dir.path().join("vm")).unwrap();
    stream.set_nonblocking(true).unwrap();
    // GET_FEATURES, until the switch waits for room for its answers and reads no more.
    let question = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    wait_for("a switch that reads no more", || match stream.write_all(&question) {
        Ok(()) => None,
        Err(err) => (err.kind() == ErrorKind::WouldBlock).then_some(()),
    });
    ask::<serde_json::Value>(&switch.control(), &Request::Remove { name: "vm".into() }).unwrap();
    ends(switch);
}

#[test]
fn a_descriptor_whose_close_never_ends_holds_up_neither_its_removal_nor_other_ports() {
    alone("a_descriptor_whose_close_never_ends_holds_up_neither_its_removal_nor_other_ports", || {
        let switch = Switch::start(0, &[]);
        let (mut b, mut c) = (switch.another(1), switch.another(2));
        let mut hostile = switch.guest(0);
        let never = Never::not_even_closed(1 << 20);
        // SAFETY: a descriptor of our own, handed over.
        let call = unsafe { EventFd::from_raw_fd(never.open().into_raw_fd()) };
        let call = Arc::new(call);
        // It is no eventfd: the switch closes it, and waits for the file system, before it says no.
        let sent = call.clone();
        let asked = std::thread::spawn(move || hostile.front().unwrap().set_vring_call(0, &sent).is_err());
        wait_for("the close", || never.is_closing().then_some(()));
        exchange(&mut b, &mut c, 1);
        ask::<serde_json::Value>(&switch.control(), &Request::Remove { name: "vm".into() }).unwrap();
        assert!(switch.port("vm").is_none());
        exchange(&mut b, &mut c, 2);
        drop(never);
        assert!(asked.join().unwrap());
    });
}
