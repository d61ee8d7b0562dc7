// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The configuration of a lab.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The IOMMU of the emulated host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Iommu {
    /// VT-d with interrupt remapping.
    Intel,
    /// AMD-Vi.
    Amd,
    /// A host without one; VFIO is refused there.
    None,
}

/// The kind of host that is emulated, which decides the emulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Machine {
    /// A host with AMD SVM, an IOMMU and devices to pass through: QEMU.
    Svm,
    /// A host with Intel VMX, EPT and VMFUNC: Bochs.
    Vmx,
}

/// Everything that can be chosen about a lab.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// The kind of host. The fields below hold for both kinds, except where they name one.
    pub machine: Machine,
    /// The IOMMU of the host (SVM).
    pub iommu: Iommu,
    /// Memory of the host in MiB; with SVM half of it on each node.
    pub memory_mib: u64,
    /// Virtual CPUs, spread over the nodes (SVM); None takes what the QEMU at hand emulates reliably.
    pub cpus: Option<u32>,
    /// Huge pages of 2 MiB to reserve at boot.
    pub huge_pages: u64,
    /// The QEMU that emulates the host (SVM); None takes the one in PATH.
    pub qemu: Option<PathBuf>,
    /// A folder that the lab sees as it is now, not as it was when the lab first looked (SVM); usually the repository.
    pub fresh: Option<PathBuf>,
    /// Programs, files and folders that are copied into the lab (VMX; the other one sees the whole machine).
    pub carried: Vec<PathBuf>,
    /// A folder that exists in the lab, empty (VMX): where commands begin.
    pub cwd: PathBuf,
    /// The agent in the lab: program and first arguments.
    pub agent: Vec<String>,
    /// More kernel arguments.
    pub kernel_arguments: String,
}

/// Why a configuration is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// Less memory than Debian and a guest need.
    #[error(
        "a lab of {0} MiB cannot hold a host and a guest in it: give it at least {MIN_MEMORY_MIB} MiB (--memory)"
    )]
    TooLittleMemory(u64),
    /// Huge pages that would take the host's own memory.
    #[error(
        "{pages} huge pages are {mib} MiB, more than three quarters of the lab's {memory_mib} MiB: ask for fewer \
         (--huge-pages) or a larger lab (--memory)"
    )]
    TooManyHugePages {
        /// Pages asked for.
        pages: u64,
        /// Their size.
        mib: u64,
        /// The lab's memory.
        memory_mib: u64,
    },
    /// No CPU, or more than the layout has room for.
    #[error("a lab has 1 to 8 CPUs, not {0} (--cpus)")]
    Cpus(u32),
    /// A path that cannot stand in an emulator's option or in the lab's init script.
    #[error(
        "the path {0:?} contains a character that is not allowed here (comma, quote, backslash, dollar or control character): \
         use another folder"
    )]
    Path(PathBuf),
}

const MIN_MEMORY_MIB: u64 = 1024;

impl Default for Config {
    fn default() -> Self {
        Self {
            machine: Machine::Svm,
            iommu: Iommu::Intel,
            memory_mib: 6144,
            cpus: None,
            huge_pages: 0,
            qemu: None,
            fresh: None,
            carried: Vec::new(),
            cwd: PathBuf::from("/"),
            agent: Vec::new(),
            kernel_arguments: String::new(),
        }
    }
}

impl Config {
    /// Refuses what cannot work, before anything is started.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.memory_mib < MIN_MEMORY_MIB {
            return Err(ConfigError::TooLittleMemory(self.memory_mib));
        }
        let mib = self.huge_pages.saturating_mul(2);
        if mib > self.memory_mib / 4 * 3 {
            return Err(ConfigError::TooManyHugePages {
                pages: self.huge_pages,
                mib,
                memory_mib: self.memory_mib,
            });
        }
        if let Some(cpus) = self.cpus.filter(|c| !(1..=8).contains(c)) {
            return Err(ConfigError::Cpus(cpus));
        }
        let paths = self.fresh.iter().chain(&self.carried).chain([&self.cwd]);
        for path in paths {
            if !plain(&path.to_string_lossy()) {
                return Err(ConfigError::Path(path.clone()));
            }
        }
        if let Some(word) = self.agent.iter().find(|w| !plain(w)) {
            return Err(ConfigError::Path(word.into()));
        }
        Ok(())
    }
}

/// Returns whether `text` can stand in an emulator's option, in quotes of a shell and in a list of paths.
pub fn plain(text: &str) -> bool {
    !text.chars().any(|c| c.is_control() || [',', '\'', '"', '\\', '$', '`'].contains(&c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_lab_is_allowed() {
        assert_eq!(Config::default().check(), Ok(()));
    }

    #[test]
    fn what_cannot_work_is_refused_with_the_option_to_change() {
        let small = Config { memory_mib: 512, ..Config::default() };
        assert!(small.check().unwrap_err().to_string().contains("--memory"));
        let huge = Config { huge_pages: 3000, ..Config::default() };
        assert!(huge.check().unwrap_err().to_string().contains("--huge-pages"));
        let overflow = Config { huge_pages: u64::MAX, ..Config::default() };
        assert!(overflow.check().is_err());
        let cpus = Config { cpus: Some(0), ..Config::default() };
        assert_eq!(cpus.check(), Err(ConfigError::Cpus(0)));
        for bad in ["/a,b", "/a'b", "/a$(x)"] {
            let config = Config { fresh: Some(bad.into()), ..Config::default() };
            assert_eq!(config.check(), Err(ConfigError::Path(bad.into())));
        }
    }
}
