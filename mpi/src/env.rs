// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo mpi env`: for launchers that start ranks in several VMs by themselves, as Slurm and hydra do. Their ranks are started by a wrapper
//! (`node/src/wrap.rs`), which this command puts into the zone, with the variables that it prints.

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, ensure};
use serde_json::{Map, Value};
use tombolo_vm::commands::cli::File;
use tombolo_vm::commands::client;

use crate::launcher::Library;
use crate::{node, run};

/// Process numbers that are kept for ranks, the highest that there are.
const RANGE: u32 = 4096;

/// Prints the variables for the ranks in a VM, as a shell reads them.
///
/// # Errors
/// The VM does not run, or has no zone.
pub fn print(file: &File, vm: &str, zone: Option<&str>, json: bool) -> anyhow::Result<ExitCode> {
    let project = file.identify()?;
    let status = client::status(&project)?;
    let runs = status.vms.iter().any(|other| other.name == vm && other.state == "up");
    ensure!(runs, "the project '{}' runs no VM '{vm}'", status.project);
    let (_, identity) = run::zone(zone, &status, &[vm.to_owned()])?;
    let said = node::output(&project, vm, &["install".to_owned(), identity])?;
    let variables =
        variables(&said).with_context(|| format!("the VM '{vm}' does not say where the zone is"))?;
    let mut out = std::io::stdout().lock();
    if json {
        let object: Map<String, Value> = variables.into_iter().map(|(n, v)| (n, v.into())).collect();
        writeln!(out, "{}", Value::Object(object))?;
        return Ok(ExitCode::SUCCESS);
    }
    for (name, value) in variables {
        let quoted = value.replace('\'', r"'\''");
        writeln!(out, "export {name}='{quoted}'")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The variables, from the lines that the VM prints: the zone's mount point, the wrapper, the largest process number.
fn variables(said: &str) -> Option<Vec<(String, String)>> {
    let mut lines = said.lines();
    let (mount, wrapper, largest) = (lines.next()?, lines.next()?, lines.next()?.parse::<u32>().ok()?);
    let base = largest.saturating_sub(RANGE).max(RANGE);
    let own = [
        ("TOMBOLO_MPI_WRAP", wrapper.to_owned()),
        ("TOMBOLO_MPI_MOUNT", mount.to_owned()),
        ("TOMBOLO_MPI_BASE", base.to_string()),
        // Launchers of several machines tell Open MPI that its ranks are on several; UCX finds out by itself.
        ("OMPI_MCA_pml", "ucx".to_owned()),
        ("OMPI_MCA_osc", "ucx".to_owned()),
    ];
    let of_ucx = Library::Mpich.variables(false);
    let of_ucx = of_ucx.iter().filter_map(|variable| variable.split_once('='));
    let all = own.into_iter().map(|(name, value)| (name.to_owned(), value));
    Some(all.chain(of_ucx.map(|(name, value)| (name.to_owned(), value.to_owned()))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vms_ranks_get_the_zone_the_wrapper_and_the_highest_process_numbers() {
        let all = variables("/mnt/a\n/mnt/a/.tombolo-mpi/wrap\n32768\n").unwrap();
        let of = |name: &str| all.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str());
        assert_eq!(of("TOMBOLO_MPI_MOUNT"), Some("/mnt/a"));
        assert_eq!(of("TOMBOLO_MPI_WRAP"), Some("/mnt/a/.tombolo-mpi/wrap"));
        assert_eq!((of("TOMBOLO_MPI_BASE"), of("UCX_TLS")), (Some("28672"), Some("posix,self")));
        assert!(variables("").is_none());
    }
}
