// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Costs of the transport alone: a call that waits and does nothing, and a posted one. Prints JSON lines (DESIGN.md, Results).
//! `tombolo-accel-bench [ADDRESS]`; without an address, that of TOMBOLO_ACCEL.

use std::time::Instant;
use tombolo_accel_client::connect::{DEFAULT, VARIABLE, connect};
use tombolo_accel_client::connection::{Connection, Lost};
use tombolo_accel_spec::common::{Ping, Snapshot};
use tombolo_accel_spec::opencl as wire;

fn report(case: &str, value: f64) {
    println!(
        "{{\"bench\":\"accel\",\"case\":\"{case}\",\"system\":\"tombolo\",\"value\":{value:.1},\"unit\":\"ns\",\"better\":\"lower\"}}"
    );
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

fn main() -> Result<(), String> {
    let address =
        std::env::args().nth(1).or_else(|| std::env::var(VARIABLE).ok()).unwrap_or_else(|| DEFAULT.into());
    let link = connect(&address, wire::API, wire::IDENTITY).map_err(|e| format!("{address}: {e}"))?;
    let c = Connection::new(link);
    let gone = |Lost| format!("{address}: the server went away");
    c.call(&Snapshot {}, |_, _| ()).map_err(gone)?;
    for _ in 0..3 {
        let mut waits = Vec::new();
        for _ in 0..50_000 {
            let begun = Instant::now();
            c.call(&Ping {}, |_, _| ()).map_err(gone)?;
            waits.push(begun.elapsed().as_nanos() as f64);
        }
        report("null-call-waits", median(waits));
        let mut posts = Vec::new();
        for _ in 0..2_000 {
            // Bursts that fit into the ring, as a program's do between two waits.
            let begun = Instant::now();
            for _ in 0..100 {
                c.post(&Ping {}).map_err(gone)?;
            }
            posts.push(begun.elapsed().as_nanos() as f64 / 100.0);
            c.call(&Ping {}, |_, _| ()).map_err(gone)?;
        }
        report("posted-call", median(posts));
    }
    Ok(())
}
