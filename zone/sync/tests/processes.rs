// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Semaphores and locks between real processes of the host: exclusion, waiting, death.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tombolo_sync::{Agent, Error, Event, Locked, Mutex, RwLock, Semaphore, Sync};
use tombolo_zone::{AreaType, Backing, Zone, ZoneConfig};

/// Longer than any operation here takes; a test that waits for it has failed.
const LONG: Option<Duration> = Some(Duration::from_secs(20));
const NOW: Option<Duration> = Some(Duration::ZERO);

struct Bench {
    dir: tempfile::TempDir,
    zone: Arc<Zone>,
    agent: Agent,
}

impl Bench {
    fn new() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let backing = Backing::File(dir.path().join("zone"));
        let zone = Arc::new(Zone::create(&ZoneConfig::new("sync", 8 << 20).backing(backing)).unwrap());
        let agent = Agent::start(Arc::clone(&zone), None).unwrap();
        Bench { dir, zone, agent }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("zone")
    }

    fn open(&self) -> Sync {
        Sync::open(self.path()).unwrap()
    }
}

/// Starts another process that opens the zone and runs `the_other_process` for `what`.
fn helper(path: &Path, what: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_other_process", "--nocapture"])
        .env("TOMBOLO_HELPER", what)
        .env("TOMBOLO_HELPER_ZONE", path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("helper is ready")), "the helper ended early");
    child
}

fn go(child: &mut Child) {
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
}

fn killed(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn ended(mut child: Child) {
    assert!(child.wait().unwrap().success());
}

const ROUNDS: u64 = 20_000;

/// No test by itself: the other process of the tests below.
#[test]
fn the_other_process() {
    let Ok(what) = std::env::var("TOMBOLO_HELPER") else { return };
    let path = std::env::var_os("TOMBOLO_HELPER_ZONE").unwrap();
    let sync = Sync::open(&path).unwrap();
    let ready = || {
        println!("helper is ready");
        let _ = std::io::stdin().read_line(&mut String::new());
    };
    match what.as_str() {
        "hold mutex" => {
            assert_eq!(Mutex::open(&sync, "m").unwrap().lock(LONG), Ok(Locked::Clean));
            ready();
        }
        "hold read" => {
            assert_eq!(RwLock::open(&sync, "rw").unwrap().read(LONG), Ok(Locked::Clean));
            ready();
        }
        "hold write" => {
            assert_eq!(RwLock::open(&sync, "rw").unwrap().write(LONG), Ok(Locked::Clean));
            ready();
        }
        "count under mutex" => {
            ready();
            let zone = Zone::open(&path, true).unwrap();
            count(&sync, &zone);
        }
        "pong" => {
            ready();
            let (ping, pong) =
                (Semaphore::open(&sync, "ping").unwrap(), Semaphore::open(&sync, "pong").unwrap());
            for _ in 0..ROUNDS {
                ping.wait(LONG).unwrap();
                pong.post().unwrap();
            }
        }
        "create" => {
            extern "C" fn noted(_: libc::c_int) {}
            // SAFETY: a handler that does nothing; without SA_RESTART it ends waits.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = noted as extern "C" fn(libc::c_int) as usize;
                libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
            }
            ready();
            // SAFETY: a plain call.
            let waiter = unsafe { libc::pthread_self() };
            std::thread::spawn(move || {
                loop {
                    // SAFETY: the process ends before that thread does.
                    unsafe { libc::pthread_kill(waiter, libc::SIGUSR1) };
                    std::thread::yield_now();
                }
            });
            let refused = Semaphore::create(&sync, "s", 0).err();
            std::process::exit(if refused == Some(Error::Os(libc::EINTR)) { 0 } else { 1 });
        }
        "advance" => {
            ready();
            Event::open(&sync, "e").unwrap().advance(5).unwrap();
        }
        other => panic!("no helper {other:?}"),
    }
    drop(sync);
    // The test runner's output has no reader.
    std::process::exit(0);
}

/// Adds to a plain counter in the zone, with loads and stores that only a mutex makes correct.
fn count(sync: &Sync, zone: &Zone) {
    let mutex = Mutex::open(sync, "m").unwrap();
    let at = zone.area(AreaType::Files, None).unwrap().offset;
    for _ in 0..ROUNDS {
        assert_eq!(mutex.lock(LONG), Ok(Locked::Clean));
        let value = zone.mem().load_u64(at).unwrap();
        zone.mem().store_u64(at, value + 1).unwrap();
        mutex.unlock().unwrap();
    }
}

#[test]
fn a_mutex_excludes_processes_and_threads() {
    let bench = Bench::new();
    let sync = bench.open();
    Mutex::create(&sync, "m").unwrap();
    let mut others: Vec<Child> = (0..2).map(|_| helper(&bench.path(), "count under mutex")).collect();
    others.iter_mut().for_each(go);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| count(&sync, &bench.zone));
        }
    });
    others.into_iter().for_each(ended);
    let at = bench.zone.area(AreaType::Files, None).unwrap().offset;
    assert_eq!(bench.zone.mem().load_u64(at).unwrap(), 4 * ROUNDS);
}

#[test]
fn semaphores_pass_the_turn_between_processes() {
    let bench = Bench::new();
    let sync = bench.open();
    let (ping, pong) =
        (Semaphore::create(&sync, "ping", 0).unwrap(), Semaphore::create(&sync, "pong", 0).unwrap());
    let mut other = helper(&bench.path(), "pong");
    go(&mut other);
    for _ in 0..ROUNDS {
        ping.post().unwrap();
        pong.wait(LONG).unwrap();
    }
    ended(other);
    assert_eq!((ping.value(), pong.value()), (Ok(0), Ok(0)));
    assert_eq!(pong.wait(NOW), Err(Error::TimedOut));
}

#[test]
fn a_mutex_of_a_killed_process_goes_to_a_waiter_that_is_told() {
    let bench = Bench::new();
    let sync = bench.open();
    let mutex = Mutex::create(&sync, "m").unwrap();
    let holder = helper(&bench.path(), "hold mutex");
    assert_eq!(mutex.lock(NOW), Err(Error::TimedOut));
    assert_eq!(mutex.unlock(), Err(Error::Os(1)), "only its owner unlocks it");
    let start = Instant::now();
    let waited = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| mutex.lock(LONG));
        killed(holder);
        waiter.join().unwrap()
    });
    assert_eq!(waited, Ok(Locked::OwnerDied));
    println!("taken over {} ms after the start of waiting", start.elapsed().as_millis());
    mutex.unlock().unwrap();
    assert_eq!(mutex.lock(NOW), Ok(Locked::Clean), "the news is told once");
}

#[test]
fn readers_share_writers_exclude_and_both_may_die() {
    let bench = Bench::new();
    let sync = bench.open();
    let lock = RwLock::create(&sync, "rw").unwrap();
    let reader = helper(&bench.path(), "hold read");
    assert_eq!(lock.read(NOW), Ok(Locked::Clean));
    assert_eq!(lock.read(NOW), Ok(Locked::Clean), "one process may read twice");
    lock.unlock_read().unwrap();
    lock.unlock_read().unwrap();
    assert_eq!(lock.unlock_read(), Err(Error::Os(1)));
    assert_eq!(lock.write(NOW), Err(Error::TimedOut), "a reader is in");
    assert_eq!(lock.read(NOW), Ok(Locked::Clean), "the writer that gave up keeps no reader out");
    lock.unlock_read().unwrap();
    killed(reader);
    assert_eq!(lock.write(LONG), Ok(Locked::Clean), "a dead reader is no reader");
    lock.unlock_write().unwrap();
    let writer = helper(&bench.path(), "hold write");
    assert_eq!(lock.read(NOW), Err(Error::TimedOut));
    killed(writer);
    assert_eq!(lock.read(LONG), Ok(Locked::OwnerDied));
    assert_eq!(lock.write(NOW), Err(Error::TimedOut), "that reader is in");
    lock.unlock_read().unwrap();
    assert_eq!(lock.write(NOW), Ok(Locked::OwnerDied), "told until a writer unlocked it");
    lock.unlock_write().unwrap();
    assert_eq!(lock.read(NOW), Ok(Locked::Clean));
}

#[test]
fn a_killed_readers_lock_is_free_although_another_process_has_its_session_now() {
    const SESSIONS: usize = 256;
    let bench = Bench::new();
    let sync = bench.open();
    let lock = RwLock::create(&sync, "rw").unwrap();
    killed(helper(&bench.path(), "hold read"));
    // Until the dead process's session is found, there is one too few for all of these.
    let mut others = Vec::new();
    while others.len() < SESSIONS - 2 {
        if let Ok(other) = Sync::open(bench.path()) {
            others.push(other);
        }
    }
    assert_eq!(lock.write(LONG), Ok(Locked::Clean), "no living process reads");
    drop(others);
}

#[test]
fn a_reader_that_holds_is_not_undone_by_one_that_has_to_wait() {
    let bench = Bench::new();
    let sync = bench.open();
    let lock = RwLock::create(&sync, "rw").unwrap();
    let counter = std::sync::atomic::AtomicU64::new(0);
    let other = bench.open();
    let writer = RwLock::open(&other, "rw").unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..5000 {
                    assert_eq!(lock.read(LONG), Ok(Locked::Clean));
                    let before = counter.load(std::sync::atomic::Ordering::Relaxed);
                    std::thread::yield_now();
                    assert_eq!(before, counter.load(std::sync::atomic::Ordering::Relaxed), "a writer was in");
                    lock.unlock_read().unwrap();
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..2000 {
                assert_eq!(writer.write(LONG), Ok(Locked::Clean));
                counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                writer.unlock_write().unwrap();
            }
        });
    });
}

/// Returns the processor time that the calling thread has used.
fn used() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn who_waits_for_a_writer_sleeps() {
    let bench = Bench::new();
    let (sync, other) = (bench.open(), bench.open());
    let (lock, same) = (RwLock::create(&sync, "rw").unwrap(), RwLock::open(&other, "rw").unwrap());
    assert_eq!(lock.write(NOW), Ok(Locked::Clean));
    let waits = |write: bool| {
        let before = used();
        let long = Some(Duration::from_secs(1));
        let waited = if write { same.write(long) } else { same.read(long) };
        assert_eq!(waited, Err(Error::TimedOut));
        used() - before
    };
    let used = std::thread::scope(|scope| {
        let all = [false, false, true].map(|write| scope.spawn(move || waits(write)));
        all.map(|thread| thread.join().unwrap())
    });
    println!("two readers and a writer used {used:?} in a second");
    assert!(used.iter().all(|used| *used < Duration::from_millis(100)), "{used:?}");
    lock.unlock_write().unwrap();
}

#[test]
fn an_event_counter_is_waited_for() {
    let bench = Bench::new();
    let sync = bench.open();
    let event = Event::create(&sync, "e", 10).unwrap();
    event.wait(10, NOW).unwrap();
    assert_eq!(event.wait(15, NOW), Err(Error::TimedOut));
    let mut other = helper(&bench.path(), "advance");
    go(&mut other);
    event.wait(15, LONG).unwrap();
    assert_eq!(event.read(), Ok(15));
    ended(other);
}

#[test]
fn names_are_made_once_found_by_all_and_free_after_destruction() {
    let bench = Bench::new();
    let (a, b) = (bench.open(), bench.open());
    let sem = Semaphore::create(&a, "name", 3).unwrap();
    assert_eq!(Semaphore::create(&b, "name", 0).err(), Some(Error::Exists));
    assert_eq!(Semaphore::open(&b, "name").unwrap().value(), Ok(3));
    assert_eq!(Mutex::open(&b, "name").err(), Some(Error::Os(22)), "it is no mutex");
    assert_eq!(Semaphore::open(&b, "other").err(), Some(Error::NotFound));
    b.destroy("name").unwrap();
    assert_eq!(b.destroy("name"), Err(Error::NotFound));
    assert_eq!(sem.post(), Err(Error::Destroyed));
    let again = Semaphore::create(&b, "name", 1).unwrap();
    assert_eq!(sem.post(), Err(Error::Destroyed), "the old handle is not the new object's");
    assert_eq!(again.value(), Ok(1));
    for bad in ["", &"x".repeat(48)] {
        assert!(matches!(Semaphore::create(&a, bad, 0).err(), Some(Error::Os(36))));
    }
}

#[test]
fn destroying_wakes_whoever_waits() {
    let bench = Bench::new();
    let sync = bench.open();
    let sem = Semaphore::create(&sync, "s", 0).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| sem.wait(LONG));
        while !sync_has_waiter(&bench) {
            std::thread::yield_now();
        }
        bench.agent.sync().destroy("s").unwrap();
        assert_eq!(waiter.join().unwrap(), Err(Error::Destroyed));
    });
}

/// Returns whether an object has a waiter: its 'waiters' word, 72 bytes into the object, is not 0.
fn sync_has_waiter(bench: &Bench) -> bool {
    let area = bench.zone.area(AreaType::Sync, None).unwrap();
    (36864..area.len).step_by(256).any(|at| bench.zone.mem().load_u64(area.offset + at + 72).unwrap() != 0)
}

#[test]
fn a_full_table_says_so_and_loses_nothing() {
    let bench = Bench::new();
    let sync = bench.open();
    let mut made = 0;
    let refusal = loop {
        match Semaphore::create(&sync, &format!("s{made}"), made) {
            Ok(_) => made += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refusal, Error::Os(28), "ENOSPC");
    assert!(made > 2500, "only {made} fit");
    for i in 0..made {
        assert_eq!(Semaphore::open(&sync, &format!("s{i}")).unwrap().value(), Ok(i));
    }
}

/// Header words of the SYNC area (`zone/format/tombolo_sync.h`).
const TABLE_LOCK: u64 = 24;
const ENDING: u64 = 32;
const SESSIONS: u64 = 2048;
const OBJECTS: u64 = 36864;

#[test]
fn a_name_whose_destruction_was_killed_half_way_is_gone_for_who_comes_next() {
    let bench = Bench::new();
    let sync = bench.open();
    let half = Semaphore::create(&sync, "half", 7).unwrap();
    let mem = bench.zone.mem();
    let area = bench.zone.area(AreaType::Sync, None).unwrap().offset;
    let name = u64::from_le_bytes(*b"half\0\0\0\0");
    let index = (0..4096).find(|i| mem.load_u64(area + OBJECTS + i * 256 + 8).unwrap() == name).unwrap();
    // A dead process had incremented the generation under its lock.
    let sleepers_and_generation = area + OBJECTS + index * 256 + 80;
    mem.store_u64(sleepers_and_generation, mem.load_u64(sleepers_and_generation).unwrap() + (1 << 32))
        .unwrap();
    mem.store_u64(area + ENDING, index + 1).unwrap();
    mem.store_u64(area + TABLE_LOCK, 99 << 32 | 1).unwrap();
    let anew = Semaphore::create(&sync, "half", 1).expect("the name is free");
    assert!(half.wait(NOW).is_err(), "the old one is gone");
    anew.wait(NOW).expect("the new one works");
    assert_eq!(mem.load_u64(area + ENDING).unwrap(), 0);
}

#[test]
fn a_read_lock_of_a_destroyed_object_is_none_of_its_successor() {
    let bench = Bench::new();
    let (reader, writer) = (bench.open(), bench.open());
    let old = RwLock::create(&reader, "rw").unwrap();
    assert_eq!(old.read(NOW), Ok(Locked::Clean));
    reader.destroy("rw").unwrap();
    let written = RwLock::create(&writer, "rw").unwrap();
    assert_eq!(written.write(NOW), Ok(Locked::Clean));
    let anew = RwLock::open(&reader, "rw").unwrap();
    assert!(anew.read(NOW).is_err(), "a writer has it");
    written.unlock_write().unwrap();
    assert_eq!(anew.read(NOW), Ok(Locked::Clean));
    assert!(old.unlock_read().is_err(), "it is gone");
    assert!(written.write(NOW).is_err(), "the successor's reader stays");
    anew.unlock_read().unwrap();
    assert_eq!(written.write(NOW), Ok(Locked::Clean));
}

#[test]
fn a_writer_that_waits_when_its_lock_is_destroyed_releases_no_successor() {
    let bench = Bench::new();
    let (reader, writer, other) = (bench.open(), bench.open(), bench.open());
    for round in 0..20 {
        let old = RwLock::create(&reader, "rw").unwrap();
        assert_eq!(old.read(NOW), Ok(Locked::Clean));
        let waits = RwLock::open(&writer, "rw").unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| waits.write(LONG));
            while !sync_has_waiter(&bench) {
                std::thread::yield_now();
            }
            reader.destroy("rw").unwrap();
            let anew = RwLock::create(&writer, "rw").unwrap();
            assert_eq!(anew.write(NOW), Ok(Locked::Clean));
            assert_eq!(waiting.join().unwrap(), Err(Error::Destroyed));
            let excluded = RwLock::open(&other, "rw").unwrap().write(NOW);
            assert_eq!(excluded, Err(Error::TimedOut), "round {round}: two writers");
            anew.unlock_write().unwrap();
        });
        writer.destroy("rw").unwrap();
    }
}

#[test]
fn a_handle_of_a_destroyed_semaphore_changes_no_object_that_takes_its_name() {
    let bench = Bench::new();
    let sync = bench.open();
    let old = Semaphore::create(&sync, "name", 0).unwrap();
    sync.destroy("name").unwrap();
    let event = Event::create(&sync, "name", 5).unwrap();
    assert_eq!((old.wait(NOW), old.post()), (Err(Error::Destroyed), Err(Error::Destroyed)));
    assert_eq!(event.read(), Ok(5));
}

#[test]
fn a_lock_that_comes_too_late_for_its_mutex_changes_no_event_that_takes_its_name() {
    const ROUNDS: usize = 20_000;
    let bench = Bench::new();
    let (makes, locks) = (bench.open(), bench.open());
    let ended = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                let Ok(mutex) = Mutex::open(&locks, "name") else { continue };
                // Until it is destroyed.
                while mutex.lock(NOW).is_ok() {
                    let _ = mutex.unlock();
                }
            }
        });
        let wrong = (0..ROUNDS).find_map(|round| {
            let _mutex = Mutex::create(&makes, "name").unwrap();
            for _ in 0..round % 300 {
                std::hint::spin_loop();
            }
            makes.destroy("name").unwrap();
            let event = Event::create(&makes, "name", 7).unwrap();
            let counts: Vec<u64> = (0..100).map(|_| event.read().unwrap()).collect();
            makes.destroy("name").unwrap();
            counts.into_iter().find(|count| *count != 7).map(|count| (round, count))
        });
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(wrong, None, "the event counted otherwise");
    });
}

#[test]
fn who_waits_for_a_process_that_stands_still_in_the_table_is_ended_by_a_signal_only() {
    let bench = Bench::new();
    let still = bench.open();
    Event::create(&still, "e", 0).unwrap();
    let mem = bench.zone.mem();
    let area = bench.zone.area(AreaType::Sync, None).unwrap().offset;
    let mut child = helper(&bench.path(), "create");
    // The lock word of the session in slot 'at', which lives.
    let at = (0..256).find(|i| mem.load_u64(area + SESSIONS + i * 8).unwrap() & 1 == 1).unwrap();
    let session = mem.load_u64(area + SESSIONS + at * 8).unwrap();
    let (epoch, generation, member) = (session >> 32, session >> 16 & 0xffff, session >> 8 & 0xff);
    mem.store_u64(area + TABLE_LOCK, epoch << 32 | generation << 16 | at << 8 | (member + 1)).unwrap();
    go(&mut child);
    assert!(child.wait().unwrap().success(), "it was not told of the signal");
    mem.store_u64(area + TABLE_LOCK, 0).unwrap();
    drop(still);
}

/// Returns copies of this process's descriptors of a file, as a process has them that is being started.
fn copies(path: &Path) -> Vec<OwnedFd> {
    let numbers = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        let link = entry.unwrap().path();
        (std::fs::read_link(&link).ok()? == path).then(|| link.file_name()?.to_str()?.parse().ok()).flatten()
    });
    // SAFETY: they are open: this test alone uses the file, in this thread.
    let copy = |number| unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned().unwrap();
    numbers.map(copy).collect()
}

#[test]
fn a_zone_that_nobody_serves_is_refused_and_one_in_use_is_not_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("zone");
    let zone = Zone::create(&ZoneConfig::new("idle", 8 << 20).backing(Backing::File(path.clone()))).unwrap();
    assert_eq!(Sync::open(&path).err(), Some(Error::NotServed));
    let agent = Agent::start(Arc::new(zone), None).unwrap();
    let sync = Sync::open(&path).unwrap();
    Semaphore::create(&sync, "kept", 7).unwrap();
    drop(agent);
    let said = Zone::take_over(&path).unwrap_err().to_string();
    assert!(said.contains("semaphores open"), "{said}");
    let _copies = copies(&path);
    drop(sync);
    let agent = Agent::start(Arc::new(Zone::take_over(&path).unwrap()), None).unwrap();
    assert_eq!(Semaphore::open(agent.sync(), "kept").unwrap().value(), Ok(7), "what is named persists");
}

#[test]
fn sessions_of_dead_processes_are_used_again() {
    let bench = Bench::new();
    let sync = bench.open();
    Mutex::create(&sync, "m").unwrap();
    for _ in 0..20 {
        let holder = helper(&bench.path(), "hold mutex");
        killed(holder);
        let _ = Mutex::open(&sync, "m").unwrap().lock(LONG).unwrap();
        Mutex::open(&sync, "m").unwrap().unlock().unwrap();
    }
    let many: Vec<Sync> = (0..250).map(|_| bench.open()).collect();
    assert_eq!(many.len(), 250);
}

#[test]
fn garbage_in_the_area_neither_hangs_nor_crashes_its_users() {
    let bench = Bench::new();
    let sync = bench.open();
    let (sem, mutex) = (Semaphore::create(&sync, "s", 0).unwrap(), Mutex::create(&sync, "m").unwrap());
    let lock = RwLock::create(&sync, "rw").unwrap();
    let area = bench.zone.area(AreaType::Sync, None).unwrap();
    let short = Some(Duration::from_millis(2));
    let mut seed = 1u64;
    for round in 0..20 {
        for _ in 0..400 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // The lines of objects, keys and the header, but not the word of the zone's server.
            let at = (seed >> 20) % (area.len / 8) * 8;
            if at >= 128 {
                bench
                    .zone
                    .mem()
                    .store_u64(area.offset + at, if round % 2 == 0 { seed } else { u64::MAX })
                    .unwrap();
            }
        }
        let _ = (sem.post(), sem.wait(short), sem.value(), mutex.lock(short), mutex.unlock());
        let _ = (lock.read(short), lock.unlock_read(), lock.write(short), lock.unlock_write());
        let _ = (Semaphore::open(&sync, "s").err(), sync.destroy("nothing"));
        let _ = Semaphore::create(&sync, &format!("n{round}"), 1).map(|s| s.wait(short));
    }
    drop(Sync::open(bench.path()));
}
