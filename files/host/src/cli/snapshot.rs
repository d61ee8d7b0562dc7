// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo files snapshot` and `restore`.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use anyhow::{Context, bail};
use serde_json::json;

use super::{Meter, open_error};
use crate::account;
use crate::area::Area;
use crate::fs::Filesystem;
use crate::snapshot;
use crate::sys;
use crate::target::{Name, Target};

/// Arguments of `tombolo files snapshot`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A zone of the running project (tombolo.toml here or above) by name, or a file with a zone or a file system
    pub(super) zone: PathBuf,
    /// The image to write; must not exist
    image: PathBuf,
    /// Name of the FILES area, where the zone has several
    #[arg(long)]
    area: Option<String>,
}

/// Arguments of `tombolo files restore`.
#[derive(Debug, clap::Args)]
pub struct RestoreArgs {
    /// The image
    image: PathBuf,
    /// A zone, by name or file, that no member uses
    pub(super) zone: PathBuf,
    /// Name of the FILES area, where the zone has several
    #[arg(long)]
    area: Option<String>,
    /// Overwrite an existing file system
    #[arg(long)]
    force: bool,
}

/// Runs `snapshot`.
pub fn run(args: &Args, json: bool) -> anyhow::Result<()> {
    let at = args.image.display();
    let target = Target::open(&args.zone, true, args.area.as_deref())?;
    let (area, joined) = target.join(Name::Process("snapshot"))?;
    let mut fs = Filesystem::open(area).map_err(|e| open_error(&args.zone, e))?;
    fs.ring_by(joined.as_ref().and_then(crate::target::Joined::ringer));
    // It has all users' files, so it is for the user alone who takes it, as a zone's file is.
    let image = File::options().read(true).write(true).create_new(true).mode(0o600).open(&args.image);
    let image = image.with_context(|| format!("{at}: the image can't be made"))?;
    let taken = if snapshot::is_inside(&fs, &image) {
        Err(anyhow::anyhow!("{at}: lies in the zone itself; write the image to another file system"))
    } else {
        let mut meter = Meter::new(json);
        snapshot::take(&fs, &image, &mut |s, d, o| meter.show(s, d, o))
    };
    drop(fs);
    if let Some(joined) = joined {
        joined.leave().context("leaving the zone")?;
    }
    let taken = match taken {
        Ok(taken) => taken,
        Err(e) => {
            std::fs::remove_file(&args.image)
                .with_context(|| format!("{at}: removing the incomplete image"))?;
            return Err(e.context(format!("{}: no snapshot was taken", args.zone.display())));
        }
    };
    let ms = taken.frozen.as_secs_f64() * 1e3;
    if json {
        println!("{}", json!({"image": args.image, "blocks": taken.blocks, "frozen_ms": ms}));
    } else {
        println!("{at}: {} MiB, checked; members stood still for {ms:.0} ms", taken.blocks >> 8);
    }
    Ok(())
}

/// Runs `restore`.
pub fn restore(args: &RestoreArgs, json: bool) -> anyhow::Result<()> {
    let at = args.image.display();
    let source = Target::open(&args.image, false, None)?;
    // Until the end no mount changes it, and no other process makes it anew.
    source.hold_image("restore")?;
    let image = source.area()?;
    let target = Target::open(&args.zone, true, args.area.as_deref())?;
    let _alone = target.hold_contents("restore")?;
    target.require_unused("restore", args.force)?;
    let area = target.area()?;
    if area.word(0) == Some(sys::TFS_MAGIC) && !args.force {
        bail!(
            "{}: has a file system already; --force overwrites it, with all files in it",
            args.zone.display()
        );
    }
    keep_grants(&target, &image)?;
    target.fill_holes()?;
    let blocks = {
        let mut meter = Meter::new(json);
        let retire = || target.retire("restore", args.force);
        snapshot::restore(&image, &area, retire, &mut |s, d, o| meter.show(s, d, o))
            .with_context(|| format!("restoring {at}"))?
    };
    area.sync().with_context(|| format!("{}: syncing", args.zone.display()))?;
    if json {
        println!("{}", json!({"zone": args.zone, "blocks": blocks}));
    } else {
        println!("{}: restored {} MiB from {at}", args.zone.display(), blocks >> 8);
    }
    Ok(())
}

/// Keeps the grants of living members, which the image does not have: a member must not get more rights by a restore.
fn keep_grants(target: &Target, image: &Area) -> anyhow::Result<()> {
    let area = target.area()?;
    if area.word(0) != Some(sys::TFS_MAGIC) {
        return Ok(());
    }
    for member in target.members()?.unwrap_or_default().iter().filter(|m| m.alive) {
        let id = member.id.index();
        let now = account::granted(&area, id);
        if now != Some([0; 3]) && now != account::granted(image, id) {
            bail!(
                "{}: the image does not hold what was granted to {}; take the grant back (tombolo files grant --none) or have it leave, restore, and \
                 grant again",
                target.path().display(),
                member.name
            );
        }
    }
    Ok(())
}
