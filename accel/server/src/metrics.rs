// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tenants for Prometheus (text format 0.0.4).

use crate::tenants::{Status, Tenants};
use std::fmt::Write as _;
use tombolo_calls::say;

type Get = fn(&Status) -> f64;

/// Name, kind, help, and where it comes from.
const FAMILIES: &[(&str, &str, &str, Get)] = &[
    ("calls_total", "counter", "Requests of a tenant.", |t| t.calls as f64),
    ("waits_total", "counter", "Requests whose result the tenant waited for.", |t| t.waits as f64),
    ("record_bytes_total", "counter", "Bytes in records.", |t| t.bytes as f64),
    ("busy_seconds_total", "counter", "From requests that were waited for to their replies.", |t| {
        t.busy_seconds
    }),
    ("held_seconds_total", "counter", "For which requests were held back by the tenant's rate.", |t| {
        t.held_seconds
    }),
    ("cpu_seconds_total", "counter", "Processor time of the tenant's worker.", |t| t.cpu_seconds),
    ("paused_seconds_total", "counter", "For which the worker's share of time was used up.", |t| {
        t.paused_seconds
    }),
    ("memory_bytes", "gauge", "Device memory in use.", |t| t.memory as f64),
    ("memory_limit_bytes", "gauge", "Device memory that may be used.", |t| t.memory_limit as f64),
    ("objects", "gauge", "Objects that live.", |t| t.objects as f64),
    ("weight", "gauge", "Share of time beside other tenants.", |t| f64::from(t.weight)),
];

/// The figures as Prometheus reads them.
pub fn prometheus(tenants: &[Status]) -> String {
    let label = |s: &str| s.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let mut out = String::new();
    // Writing to a string can't fail.
    let _infallible = writeln!(
        out,
        "# HELP tombolo_accel_tenants Clients that are served.\n# TYPE tombolo_accel_tenants gauge\ntombolo_accel_tenants {}",
        tenants.len()
    );
    for (name, kind, help, get) in FAMILIES {
        let _infallible =
            writeln!(out, "# HELP tombolo_accel_{name} {help}\n# TYPE tombolo_accel_{name} {kind}");
        for t in tenants {
            let _infallible = writeln!(
                out,
                "tombolo_accel_{name}{{pid=\"{}\",name=\"{}\",via=\"{}\"}} {}",
                t.pid,
                label(&t.name),
                label(&t.via),
                get(t)
            );
        }
    }
    out
}

/// Answers HTTP requests.
pub fn serve(server: &tombolo_metrics::Server, tenants: &Tenants) {
    if let Err(err) = server.serve("figures", || prometheus(&tenants.status())) {
        say!("tombolo accel: metrics ended: {err}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_a_client_chose_can_not_break_out_of_its_label() {
        let tenant = Status {
            pid: 7,
            name: "a\"} 1\nb".into(),
            via: "unix:/s".into(),
            weight: 100,
            memory: 4096,
            memory_limit: 8192,
            objects: 3,
            objects_limit: 10,
            calls: 5,
            waits: 2,
            bytes: 100,
            busy_seconds: 0.5,
            held_seconds: 0.0,
            cpu_seconds: 0.0,
            paused_seconds: 0.0,
            seconds: 1.0,
        };
        let text = prometheus(&[tenant]);
        assert!(
            text.contains(
                "tombolo_accel_memory_bytes{pid=\"7\",name=\"a\\\"} 1\\nb\",via=\"unix:/s\"} 4096\n"
            )
        );
        assert!(text.lines().all(|l| l.starts_with("# ") || l.starts_with("tombolo_accel_")), "{text}");
    }
}
