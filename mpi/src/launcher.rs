// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How each library's launcher is called, and the variables that have the library use shared memory between all ranks. Why each is needed:
//! `docs/decisions/0150-a-job-looks-like-one-machine.md`.

use std::fmt;

/// What launchers start for each rank (`node/src/rank.rs`).
const WRAPPER: [&str; 2] = ["/dev/shm/.tombolo/rank", "rank"];

/// An MPI library, with its launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// Open MPI 4.1 and 5.
    OpenMpi,
    /// MPICH with hydra.
    Mpich,
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Library::OpenMpi => "Open MPI",
            Library::Mpich => "MPICH",
        })
    }
}

impl Library {
    /// Both.
    pub const ALL: [Library; 2] = [Library::OpenMpi, Library::Mpich];

    /// Its word on command lines, and among a guest's facts.
    pub fn word(self) -> &'static str {
        match self {
            Library::OpenMpi => "openmpi",
            Library::Mpich => "mpich",
        }
    }

    /// Debian's package of its launcher and library.
    pub fn package(self) -> &'static str {
        match self {
            Library::OpenMpi => "openmpi-bin",
            Library::Mpich => "mpich",
        }
    }

    /// The bytes of the zone that so many ranks take at the start, with room for messages.
    pub fn space(self, ranks: u32) -> u64 {
        let each: u64 = match self {
            Library::OpenMpi => 8 << 20,
            Library::Mpich => 24 << 20,
        };
        u64::from(ranks) * each + (4 << 20)
    }

    /// The variables of the launcher and of all ranks. `yields`: ranks that wait give way, as there are more ranks than CPUs.
    pub fn variables(self, yields: bool) -> Vec<String> {
        let fixed: &[&str] = match self {
            Library::OpenMpi => &[
                "OMPI_ALLOW_RUN_AS_ROOT=1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                "OMPI_MCA_plm=isolated",
                "OMPI_MCA_pml=ob1",
                "OMPI_MCA_btl=self,vader",
                "OMPI_MCA_btl_vader_single_copy_mechanism=none",
                "OMPI_MCA_btl_vader_backing_directory=/dev/shm",
                "OMPI_MCA_osc=^ucx",
                "OMPI_MCA_orte_tmpdir_base=/dev/shm",
                "PMIX_MCA_gds=hash",
                "PMIX_MCA_ptl=tcp",
            ],
            Library::Mpich => &["UCX_TLS=posix,self", "UCX_POSIX_DIR=/dev/shm", "UCX_POSIX_USE_PROC_LINK=n"],
        };
        let mut all: Vec<String> = fixed.iter().map(|variable| (*variable).to_owned()).collect();
        if self == Library::OpenMpi && yields {
            all.push("OMPI_MCA_mpi_yield_when_idle=1".into());
        }
        all
    }

    /// The command line that starts `command` as so many ranks.
    pub fn command(self, launcher: &str, ranks: u32, command: &[String]) -> Vec<String> {
        let ranks = ranks.to_string();
        let host = format!("localhost:{ranks}");
        let words: Vec<&str> = match self {
            Library::OpenMpi => vec![launcher, "--host", &host, "-np", &ranks, "--bind-to", "none"],
            Library::Mpich => vec![launcher, "-launcher", "fork", "-pmi-port", "-n", &ranks],
        };
        let words = words.into_iter().chain(WRAPPER).map(str::to_owned);
        words.chain(command.iter().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wrapper_stands_between_the_launchers_options_and_the_program() {
        let command = ["./a".to_owned(), "-n".to_owned()];
        for library in Library::ALL {
            let words = library.command("/usr/bin/run", 4, &command);
            let wrapper = words.iter().position(|word| *word == WRAPPER[0]).unwrap();
            assert_eq!(words[0], "/usr/bin/run");
            assert_eq!(words[wrapper + 1..], [WRAPPER[1], "./a", "-n"]);
        }
    }

    #[test]
    fn only_open_mpi_is_told_to_yield() {
        let yields = |library: Library, yields| library.variables(yields).iter().any(|v| v.contains("yield"));
        assert!(yields(Library::OpenMpi, true) && !yields(Library::OpenMpi, false));
        assert!(!yields(Library::Mpich, true));
    }
}
