// SPDX-License-Identifier: Apache-2.0 OR MIT
//! fio's matrix: which cells, the command for the guest, and the figures out of fio's JSON.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};

use super::systems::{Io, System};
use crate::record::Group;
use crate::report::wanted;

/// The group of the cells that two VMs run at the same time.
pub const VMS: &str = "vms2";

/// The cells: every kind with every block size and number of jobs.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// fio's `rw`.
    pub kinds: Vec<String>,
    /// fio's `bs`.
    pub sizes: Vec<String>,
    /// fio's `numjobs`.
    pub jobs: Vec<u32>,
    /// Milliseconds per cell.
    pub runtime_ms: u32,
    /// All jobs' files together, in MiB.
    pub total_mb: u32,
    /// Only cases whose name contains one of these words; none: all.
    pub only: Vec<String>,
}

fn words(all: &[&str]) -> Vec<String> {
    all.iter().map(|word| (*word).to_owned()).collect()
}

impl Matrix {
    /// StargateFS's matrix, on smaller files: each system has its own, and so has the page cache.
    pub fn full() -> Matrix {
        Matrix {
            // Reads come first: what is written may have to be read again by a cache.
            kinds: words(&["read", "randread", "write", "randwrite"]),
            sizes: words(&["4k", "16k", "128k", "2M"]),
            jobs: vec![1, 2, 4],
            runtime_ms: 700,
            total_mb: 128,
            only: Vec::new(),
        }
    }

    /// Four cells.
    pub fn quick() -> Matrix {
        Matrix {
            kinds: words(&["randread", "randwrite"]),
            sizes: words(&["4k", "128k"]),
            jobs: vec![1],
            runtime_ms: 500,
            total_mb: 64,
            only: Vec::new(),
        }
    }

    /// Returns whether a case is wanted.
    pub fn wants(&self, case: &str) -> bool {
        wanted(case, &self.only)
    }

    /// Kinds and sizes that are wanted of a group of cells, "j1", "j1-buffered" or the like.
    fn cells(&self, group: &str) -> Vec<(&str, &str)> {
        let all =
            self.kinds.iter().flat_map(|kind| self.sizes.iter().map(move |bs| (kind.as_str(), bs.as_str())));
        all.filter(|(kind, bs)| self.wants(&format!("fio-{kind}-{bs}-{group}"))).collect()
    }

    /// Returns whether a cell that two VMs run at once is wanted.
    pub fn wants_vms(&self) -> bool {
        [Io::Direct, Io::Buffered].iter().any(|io| !self.cells(&group(VMS, *io)).is_empty())
    }

    fn file_mb(&self, jobs: u32) -> u32 {
        self.total_mb / jobs
    }

    /// Makes the files that the cells use, so that no cell pays for it: file N is as large as the largest job N asks for.
    pub fn prepare(&self, dir: &str) -> String {
        let any = |jobs: &u32, io| !self.cells(&jobs_group(*jobs, io)).is_empty();
        let wanted = |jobs: &&u32| any(jobs, Io::Direct) || any(jobs, Io::Buffered);
        let jobs: Vec<u32> = self.jobs.iter().filter(wanted).copied().collect();
        let most = jobs.iter().copied().max().unwrap_or(0);
        let mut script = String::from("set -e\n");
        for i in 0..most {
            let mb = jobs.iter().filter(|j| i < **j).map(|j| self.file_mb(*j)).max().unwrap_or(0);
            let _ = writeln!(script, "dd if=/dev/zero of={dir}/fio.{i} bs=1M count={mb} 2>/dev/null");
        }
        script + "sync\n"
    }

    /// Makes the file that a VM uses when several run at once, unless it's there.
    pub fn prepare_vm(&self, dir: &str, vm: &str) -> String {
        format!(
            "{{ [ -e {dir}/fio.{vm} ] || dd if=/dev/zero of={dir}/fio.{vm} bs=1M count={} 2>/dev/null; }}",
            self.file_mb(2)
        )
    }

    /// One fio process for all cells of a number of jobs, one after the other; `None`: no cell is wanted.
    pub fn fio(&self, dir: &str, jobs: u32, io: Io) -> Option<String> {
        self.command(dir, "fio.$jobnum", jobs, self.file_mb(jobs), io, &jobs_group(jobs, io))
    }

    /// The same, of one VM among several that work at the same time.
    pub fn fio_vm(&self, dir: &str, vm: &str, io: Io) -> Option<String> {
        self.command(dir, &format!("fio.{vm}"), 1, self.file_mb(2), io, &group(VMS, io))
    }

    fn command(&self, dir: &str, file: &str, jobs: u32, mb: u32, io: Io, group: &str) -> Option<String> {
        let direct = u8::from(io == Io::Direct);
        let mut command = format!(
            "fio --output-format=json --directory={dir} --filename_format='{file}' --ioengine=psync --direct={direct} \
             --size={mb}M --numjobs={jobs} --group_reporting --time_based --runtime={}ms --fallocate=none --overwrite=1 \
             --random_generator=tausworthe64 --norandommap --invalidate=0 --thread",
            self.runtime_ms
        );
        let cells = self.cells(group);
        for (kind, bs) in &cells {
            let _ = write!(command, " --name={kind}-{bs} --stonewall --rw={kind} --bs={bs}");
        }
        (!cells.is_empty()).then_some(command)
    }

    /// The start of a script, which reads files of fio's before a cell does: a cache then holds what it can hold.
    pub fn warm_up(system: &System, io: Io, files: &str) -> String {
        if system.group == Group::Cached && io == Io::Buffered {
            format!("cat {}/{files} >/dev/null && ", system.dir())
        } else {
            String::new()
        }
    }

    /// Cases and MB/s (10^6 bytes) out of fio's output; `group`: "j1", "j1-buffered" or the like.
    pub fn read(&self, output: &str, group: &str) -> Result<Vec<(String, f64)>> {
        let start = output.find('{').with_context(|| format!("fio printed no JSON: {output}"))?;
        let parsed: serde_json::Value =
            serde_json::from_str(&output[start..]).context("fio's JSON is cut short")?;
        let groups = parsed["jobs"].as_array().context("fio's JSON has no jobs")?;
        let wanted = self.cells(group).len();
        if groups.len() != wanted {
            bail!("fio reported {} cells, not {wanted}", groups.len());
        }
        groups
            .iter()
            .map(|job| {
                let name = job["jobname"].as_str().context("a job without a name")?;
                if job["error"].as_i64() != Some(0) {
                    bail!("fio's job {name} ended with error {}", job["error"]);
                }
                let side = if name.contains("read") { "read" } else { "write" };
                let bytes =
                    job[side]["bw_bytes"].as_f64().with_context(|| format!("{name} has no bandwidth"))?;
                Ok((format!("fio-{name}-{group}"), bytes / 1e6))
            })
            .collect()
    }
}

/// A group of cells with its way of opening files.
pub fn group(name: &str, io: Io) -> String {
    format!("{name}{}", io.suffix())
}

/// The group of the cells of a number of jobs.
pub fn jobs_group(jobs: u32, io: Io) -> String {
    group(&format!("j{jobs}"), io)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Matrix {
        Matrix {
            kinds: words(&["read", "randwrite"]),
            sizes: words(&["4k"]),
            jobs: vec![1, 4],
            runtime_ms: 100,
            total_mb: 64,
            only: Vec::new(),
        }
    }

    #[test]
    fn cells_are_chosen_by_words_in_their_names() {
        let some = Matrix { only: vec!["4k-j4".into(), "randwrite-4k-vms".into()], ..small() };
        assert!(some.fio("/m", 1, Io::Direct).is_none());
        assert_eq!(some.fio("/m", 4, Io::Direct).unwrap().matches("--name=").count(), 2);
        let both = some.fio_vm("/m", "other", Io::Direct).unwrap();
        assert_eq!(both.matches("--name=").count(), 1);
        assert!(both.contains("--filename_format='fio.other'") && both.contains("--size=32M"), "{both}");
    }

    #[test]
    fn buffered_cells_are_cases_of_their_own() {
        let some = Matrix { only: vec!["read-4k-j1-buffered".into()], ..small() };
        assert!(
            some.fio("/m", 1, Io::Direct).is_none() && some.fio_vm("/m", "other", Io::Buffered).is_none()
        );
        let command = some.fio("/m", 1, Io::Buffered).unwrap();
        assert!(command.contains(" --direct=0 ") && command.matches("--name=").count() == 1, "{command}");
        assert!(some.prepare("/m").contains("of=/m/fio.0"), "its file is made");
        let json = r#"{"jobs":[{"jobname":"read-4k","error":0,"read":{"bw_bytes":2000000}}]}"#;
        let cells = some.read(json, &jobs_group(1, Io::Buffered)).unwrap();
        assert_eq!(cells, [("fio-read-4k-j1-buffered".to_owned(), 2.0)]);
        assert!(!some.wants_vms() && small().wants_vms());
    }

    #[test]
    fn only_a_cache_that_is_measured_is_warmed_up() {
        let of = |name: &str| crate::files::systems::ALL.iter().find(|system| system.name == name).unwrap();
        let warm = |name: &str, io| !Matrix::warm_up(of(name), io, "fio.*").is_empty();
        assert!(warm("nfs", Io::Buffered) && warm("9p-loose", Io::Buffered));
        assert!(!warm("nfs", Io::Direct) && !warm("tombolo", Io::Buffered));
    }

    #[test]
    fn files_are_as_large_as_the_largest_job_needs() {
        let script = small().prepare("/m");
        assert!(script.contains("of=/m/fio.0 bs=1M count=64"), "{script}");
        assert!(script.contains("of=/m/fio.3 bs=1M count=16"), "{script}");
    }

    #[test]
    fn figures_are_read_with_their_cells() {
        let json = r#"note: something {"jobs":[
            {"jobname":"read-4k","error":0,"read":{"bw_bytes":2000000},"write":{"bw_bytes":0}},
            {"jobname":"randwrite-4k","error":0,"read":{"bw_bytes":0},"write":{"bw_bytes":5000000}}]}"#;
        let cells = small().read(json, "j4").unwrap();
        assert_eq!(cells, vec![("fio-read-4k-j4".to_owned(), 2.0), ("fio-randwrite-4k-j4".to_owned(), 5.0)]);
    }

    #[test]
    fn a_failed_job_or_a_missing_cell_is_an_error() {
        assert!(small().read("{\"jobs\":[]}", "j1").is_err());
        let failed = r#"{"jobs":[{"jobname":"read-4k","error":5,"read":{"bw_bytes":1}},{"jobname":"randwrite-4k","error":0,"write":{"bw_bytes":1}}]}"#;
        assert!(small().read(failed, "j1").is_err());
        assert!(small().read("no json", "j1").is_err());
    }
}
