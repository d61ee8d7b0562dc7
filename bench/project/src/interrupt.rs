// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ctrl-C while a bench runs: the bench ends at its next check, and on its way out takes down what it has started.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, ensure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

static ASKED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on SIGINT, SIGTERM and SIGHUP do not end the process; [`check`] returns an error after one of them.
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

/// Returns whether such a signal has arrived.
#[must_use]
pub fn is_asked() -> bool {
    ASKED.get().is_some_and(|flag| flag.load(Ordering::Acquire))
}

/// Ends the bench if such a signal has arrived.
///
/// # Errors
/// It has.
pub fn check() -> Result<()> {
    ensure!(!is_asked(), "interrupted");
    Ok(())
}
