// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch as a program of its own.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use tombolo_net::endpoint::{Endpoint, Role};
use tombolo_net::features::OFFERED;
use tombolo_net::frame::Mac;
use tombolo_net::policy::Policy;
use tombolo_net::port::Port;
use tombolo_net::switch::Switch;
use tombolo_net::view::Attached;
use tombolo_net::worker::{Pace, Worker};

/// A vhost-user switch.
#[derive(Parser)]
struct Args {
    /// A port: MAC,SOCKET
    #[arg(long)]
    port: Vec<String>,
    /// Processor of the worker
    #[arg(long)]
    cpu: Option<usize>,
    /// Microseconds of polling after the last frame
    #[arg(long, default_value_t = 50)]
    poll_us: u64,
}

fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let args = Args::parse();
    let switch = Arc::new(Switch::new(1)?);
    let stop = Arc::new(AtomicBool::new(false));
    for (i, text) in args.port.iter().enumerate() {
        let (mac, path) = text.split_once(',').context("a port is MAC,SOCKET")?;
        let policy = Policy { macs: vec![mac.parse::<Mac>()?], ..Policy::default() };
        let port = Arc::new(Port::new(&format!("port{i}"), 4));
        switch.attach(Attached { port: port.clone(), policy: Arc::new(policy), uplink: None })?;
        let endpoint = Endpoint::open(&PathBuf::from(path), Role::Server)?;
        let (switch, stop) = (switch.clone(), stop.clone());
        std::thread::spawn(move || endpoint.serve(&switch, &port, OFFERED, &stop));
    }
    let pace = Pace { poll: Duration::from_micros(args.poll_us), cpu: args.cpu };
    Worker::new(switch, 0, pace, stop)?.run()?;
    Ok(())
}
