// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Landlock: what the worker's root has, once more by rule; and what no mount keeps apart.

use anyhow::{Context, bail};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};

const MISSING: &str =
    "this kernel has none: it needs CONFIG_SECURITY_LANDLOCK, and 'landlock' in lsm= where that is set";

/// Restricts this process. Inside of a view (see [`super::view`]).
pub fn set() -> anyhow::Result<()> {
    // Rights that a kernel doesn't know yet are left out, but for the first version.
    let newest = ABI::V7;
    let all = AccessFs::from_all(newest);
    let read = AccessFs::from_read(newest);
    let device = AccessFs::ReadFile
        | AccessFs::WriteFile
        | AccessFs::ReadDir
        | AccessFs::IoctlDev
        | AccessFs::Truncate;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))
        .context(MISSING)?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)?
        .handle_access(AccessNet::from_all(newest))?
        .scope(Scope::from_all(newest))?
        .create()?
        .set_compatibility(CompatLevel::BestEffort);
    // The root itself has no rule, so nothing can be read in it.
    let rights: [(&str, BitFlags<AccessFs>); 3] = [("dev", device), ("tmp", all), ("proc", read)];
    for entry in std::fs::read_dir("/")? {
        let entry = entry?;
        let name = entry.file_name();
        let given = rights.iter().find(|(path, _)| *path == name).map_or(read, |(_, rights)| *rights);
        let path = PathFd::new(entry.path())?;
        rules = rules.add_rule(PathBeneath::new(path, given))?;
    }
    if rules.restrict_self()?.ruleset == RulesetStatus::NotEnforced {
        bail!("{MISSING}");
    }
    Ok(())
}
