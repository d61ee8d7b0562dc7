// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo-service`: checks the object of a service, serves one, and calls one by hand.

use clap::{Parser, Subcommand};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use tombolo_service::host::{Offered, vm_of};
use tombolo_service::image::Image;
use tombolo_service::loaded::Loaded;
use tombolo_service::{Places, bind, check_name, ring};

/// Services that other VMs call.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check that an object can be a service
    Check {
        /// The object, linked as <tombolo/service.h> says
        object: PathBuf,
    },
    /// Serve a service until the process is ended
    Serve {
        /// The name by which clients bind
        name: String,
        /// The object
        object: PathBuf,
        /// Serve processes of this machine by rings, at a socket with the service's name in FOLDER
        #[arg(long, value_name = "FOLDER")]
        ring: Option<PathBuf>,
        /// Let the VM of this QEMU process bind by VMFUNC (the module tombolo_service_host must be loaded)
        #[arg(long, value_name = "PID")]
        vm: Vec<i32>,
    },
    /// Call a function once and print its result
    Call {
        /// The service
        name: String,
        /// The function's index
        call: u32,
        /// Up to three numbers
        #[arg(num_args = 0..=3)]
        arguments: Vec<u64>,
        /// The folder of the rings' sockets
        #[arg(long, value_name = "FOLDER")]
        ring: Option<PathBuf>,
    },
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tombolo_calls::say!("tombolo-service: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Check { object } => {
            let image = Image::read(&object)?;
            println!("{}: {} calls, {} KiB", object.display(), image.calls.len(), image.len() / 1024);
            Ok(())
        }
        Command::Serve { name, object, ring, vm } => serve(&name, &Image::read(&object)?, ring, &vm),
        Command::Call { name, call, arguments, ring } => {
            let mut places = Places::default();
            if let Some(sockets) = ring {
                places.sockets = sockets;
            }
            let mut three = [0; 3];
            three[..arguments.len()].copy_from_slice(&arguments);
            println!("{}", bind(&places, &name)?.call(call, three)?);
            Ok(())
        }
    }
}

fn serve(name: &str, image: &Image, ring: Option<PathBuf>, vms: &[i32]) -> Result<()> {
    check_name(name)?;
    let _offered = if vms.is_empty() {
        None
    } else {
        let offered = Offered::new(name, image)?;
        for vm in vms {
            offered.admit(&vm_of(*vm)?)?;
        }
        println!("{name}: open to {} VMs", vms.len());
        Some(offered)
    };
    let Some(folder) = ring else {
        if vms.is_empty() {
            return Err("nobody could call it: name a folder for rings (--ring), or VMs (--vm)".into());
        }
        loop {
            std::thread::park();
        }
    };
    let socket = folder.join(name);
    let listener = UnixListener::bind(&socket).map_err(|e| {
        format!(
            "{}: {e}; another server may have this name, or an earlier one left the file: remove it then",
            socket.display()
        )
    })?;
    println!("{name}: served at {}", socket.display());
    Ok(ring::serve(&listener, name, &Arc::new(Loaded::new(image)?))?)
}
