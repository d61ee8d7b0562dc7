// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo files grant` and `accounts`: how much a member may store, and the directory that it is confined to.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use rustix::io::Errno;
use serde_json::json;

use super::open_error;
use crate::account;
use crate::fs::{self, Create, Filesystem, Handle};
use crate::fsck;
use crate::shown::shown;
use crate::sys;
use crate::target::{Name, Target};

/// Arguments of `tombolo files grant`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A zone of the running project (tombolo.toml here or above) by name, or a zone's file
    pub(super) zone: PathBuf,
    /// The member, by name: a VM that is invited to the zone
    member: String,
    /// Confine it to this directory, which is made if it is missing; holds from its next mount on
    #[arg(long, default_value = "/")]
    subtree: String,
    /// Bytes that its files may take together (K, M, G); none: no limit. Holds at once, for what the member creates from
    /// now on
    #[arg(long, value_parser = tombolo_control::Size::bytes_of)]
    bytes: Option<u64>,
    /// Files and directories that it may create, 1 at least; none: no limit. Holds at once, for what the member creates from now on
    #[arg(long)]
    inodes: Option<u64>,
    /// The account that its files count for; members may share one. The member's own name if not given
    #[arg(long)]
    account: Option<String>,
    /// Revoke the grant: no limits, the whole file system
    #[arg(long, conflicts_with_all = ["subtree", "bytes", "inodes", "account"])]
    none: bool,
    /// Name of the FILES area, where the zone has several
    #[arg(long)]
    area: Option<String>,
}

/// Runs `grant`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let at = args.zone.display();
    if args.bytes == Some(0) || args.inodes == Some(0) {
        bail!(
            "a limit is 1 at least; a member that is to make nothing gets read access only ('rights' in the compose file, 'zone invite --read-only')"
        );
    }
    let target = Target::open(&args.zone, true, args.area.as_deref())?;
    // Two at once could give one account to two names, or two accounts to one; `up` grants for several VMs at the same time.
    let _one = target.hold_grants()?;
    let Some(members) = target.members()? else {
        bail!("{at}: a file system outside a zone has no members");
    };
    let Some(member) = members.iter().find(|m| m.name == args.member) else {
        let names: Vec<&str> = members.iter().map(|m| m.name.as_str()).collect();
        bail!("{at}: has no member '{}'; it has: {}", args.member, names.join(", "));
    };
    if args.none {
        let area = target.area()?;
        if area.word(0) != Some(sys::TFS_MAGIC) {
            return Ok(()); // no file system, and no grants
        }
        fsck::expect_known(&area).with_context(|| at.to_string())?;
        if !account::revoke(&area, member.id.index()) {
            bail!("{at}: the area is too small for a file system");
        }
        return Ok(());
    }
    let (area, joined) = target.join(Name::Process("grant"))?;
    let mut fs = Filesystem::open(area).map_err(|e| open_error(&args.zone, e))?;
    fs.ring_by(joined.as_ref().and_then(crate::target::Joined::ringer));
    let root = directory(&fs, &args.subtree)?;
    let name = args.account.as_ref().unwrap_or(&args.member);
    let blocks = args.bytes.map_or(0, |b| (b / 4096).max(1));
    fs.grant(member.id.index(), name, blocks, args.inodes.unwrap_or(0), root).map_err(|e| match e {
        Errno::NOSPC => anyhow::anyhow!("{at}: all {} accounts are taken", account::MAX),
        Errno::INVAL => anyhow::anyhow!("{at}: '{name}' is no name of an account: 1 to 31 bytes"),
        _ => anyhow::Error::new(e).context(format!("{at}: granting")),
    })?;
    drop(fs);
    if let Some(joined) = joined {
        joined.leave().context("leaving the zone")?;
    }
    Ok(())
}

/// Returns the directory at a path, `None`: the root; makes it and its parents if they are missing.
fn directory(fs: &Filesystem, path: &str) -> anyhow::Result<Option<Handle>> {
    let mut at = None;
    for name in path.split('/').filter(|n| !n.is_empty() && *n != ".") {
        if name == ".." {
            bail!("{path}: write the path without '..'");
        }
        let dir = at.unwrap_or(fs::ROOT.into());
        at = Some(match fs.lookup(dir, name.as_bytes()) {
            Ok((found, libc::DT_DIR)) => found,
            Ok(_) => bail!("{path}: {name} is no directory"),
            Err(Errno::NOENT) => fs
                .create(dir, Some(name.as_bytes()), &Create::mode(libc::S_IFDIR | 0o755))
                .with_context(|| format!("{path}: making {name}"))?,
            Err(e) => return Err(e).with_context(|| format!("{path}: at {name}")),
        });
    }
    Ok(at)
}

/// Runs `accounts`.
pub fn accounts(zone: &Path, area: Option<&str>, json: bool) -> anyhow::Result<()> {
    let target = Target::open(zone, false, area)?;
    let fs = Filesystem::open(target.area()?).map_err(|e| open_error(zone, e))?;
    let all = account::list(&fs);
    if json {
        println!("{}", json!(all));
        return Ok(());
    }
    let or_none = |limit: u64| if limit == 0 { "-".to_owned() } else { limit.to_string() };
    println!("{:<32} {:>10} {:>10} {:>10} {:>10}", "account", "KiB", "limit", "inodes", "limit");
    for a in all {
        println!(
            "{:<32} {:>10} {:>10} {:>10} {:>10}",
            shown(&a.name),
            a.bytes >> 10,
            or_none(a.bytes_limit >> 10),
            a.inodes,
            or_none(a.inodes_limit)
        );
    }
    Ok(())
}
