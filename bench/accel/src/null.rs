// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The transport alone.

use std::time::Instant;

use anyhow::{Result, anyhow};
use rustix::thread::{CpuSet, sched_setaffinity};
use tombolo_accel_client::connect::connect;
use tombolo_accel_client::connection::{Connection, Lost};
use tombolo_accel_spec::common::{Ping, Snapshot};
use tombolo_accel_spec::opencl as wire;

/// Medians in nanoseconds: a call that does nothing and waits, and one that is posted, in bursts as a program's are between two waits.
/// The client runs on the processor `cpu`; `pin` does the same for its worker.
pub fn measure(address: &str, cpu: usize, pin: impl FnOnce() -> Result<()> + Send) -> Result<(f64, f64)> {
    // A thread of its own, so that only it is bound.
    let measured = std::thread::scope(|scope| scope.spawn(|| bound(address, cpu, pin)).join());
    measured.map_err(|_| anyhow!("the measurement panicked"))?
}

fn bound(address: &str, cpu: usize, pin: impl FnOnce() -> Result<()>) -> Result<(f64, f64)> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    sched_setaffinity(None, &cpus)?;
    let link = connect(address, wire::API, wire::IDENTITY).map_err(|e| anyhow!("{address}: {e}"))?;
    let c = Connection::new(link).map_err(|e| anyhow!("{address}: {e}"))?;
    let gone = |Lost| anyhow!("{address}: the server went away");
    c.call(&Snapshot {}, |_, _| ()).map_err(gone)?;
    pin()?;
    let mut waits = Vec::new();
    for _ in 0..20_000 {
        let begun = Instant::now();
        c.call(&Ping {}, |_, _| ()).map_err(gone)?;
        waits.push(begun.elapsed().as_nanos() as f64);
    }
    let mut posts = Vec::new();
    for _ in 0..2_000 {
        let begun = Instant::now();
        for _ in 0..100 {
            c.post(&Ping {}).map_err(gone)?;
        }
        posts.push(begun.elapsed().as_nanos() as f64 / 100.0);
        c.call(&Ping {}, |_, _| ()).map_err(gone)?;
    }
    Ok((crate::median(&mut waits), crate::median(&mut posts)))
}
