// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ctrl-C while a bench runs: nothing is cut off, the bench ends at its next look, and on its way out takes down what it
//! has started.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, ensure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

static ASKED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From here on SIGINT, SIGTERM and SIGHUP are told by [`check`] rather than end the process.
///
/// # Errors
/// They can't be caught.
pub fn watch() -> Result<()> {
    let flag = ASKED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, flag.clone()).context("signals can't be caught")?;
    }
    Ok(())
}

/// Has a signal come?
#[must_use]
pub fn is_asked() -> bool {
    ASKED.get().is_some_and(|flag| flag.load(Ordering::Acquire))
}

/// Ends the bench if a signal has come.
///
/// # Errors
/// One has.
pub fn check() -> Result<()> {
    ensure!(!is_asked(), "interrupted");
    Ok(())
}
