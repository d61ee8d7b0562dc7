// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Neighbours of a client that is measured. Processor time is divided between clients, so a client with a neighbour gets less done than alone; a hostile
//! neighbour (accel/tests/escape.c) is compared with one that computes as much as it may.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tombolo_record::Better;

use crate::program::Place;

/// The neighbour that means no harm.
pub const ORDINARY: &str = "ordinary";
/// The actions of hostile neighbours: take memory, files, sockets and processes; start processes without end; run one for ever; talk without end in the
/// server's log; come and go.
pub const HOSTILE: [&str; 5] = ["fill", "many", "linger", "chatter", "come"];

/// Between two looks whether a neighbour has ended.
const LOOK: Duration = Duration::from_millis(20);
/// The work of an ordinary neighbour: longer than any measurement.
const LONG: &str = "busy 3600";

/// The neighbours in the order of a turn, which is turned round every other time.
pub fn order(turn: u32) -> Vec<&'static str> {
    let all = [ORDINARY].into_iter().chain(HOSTILE);
    if turn % 2 == 0 { all.collect() } else { all.rev().collect() }
}

/// By how many percent of the ordinary figure another one is worse.
pub fn loss(ordinary: f64, hostile: f64, better: Better) -> f64 {
    let worse = match better {
        Better::Higher => ordinary - hostile,
        Better::Lower => hostile - ordinary,
    };
    worse / ordinary * 100.0
}

/// Compiles the hostile program.
///
/// # Errors
/// The compiler's.
pub fn compile(place: &Place) -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../accel/tests/escape.c");
    let program = place.path("escape");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-o"]).arg(&program).arg(&source).arg("-lOpenCL");
    let compiled = cc.status().context("can't run cc (packages gcc, ocl-icd-opencl-dev)")?;
    ensure!(compiled.success(), "can't compile {}", source.display());
    Ok(program)
}

/// A client beside the one that is measured, which begins again whenever it has ended, as its server may end it.
pub struct Neighbour {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

impl Neighbour {
    /// Starts it.
    ///
    /// # Errors
    /// There is no thread for it.
    pub fn start(what: &'static str, place: &Place, hostile: &Path) -> Result<Neighbour> {
        let over = Arc::new(AtomicBool::new(false));
        let (address, ordinary, seen) = (place.address(), place.path("opencl"), over.clone());
        let mut command = if what == ORDINARY {
            place.with_driver(&ordinary, Some(&address))
        } else {
            let mut command = place.with_driver(hostile, Some(&address));
            command.arg(what);
            command
        };
        // It ends with its input, so the pipe is kept; what it says is of no use here.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let named = std::thread::Builder::new().name("neighbour".into());
        let thread = named.spawn(move || {
            while !seen.load(Ordering::SeqCst) {
                live(command.spawn().context("the neighbour")?, &seen)?;
            }
            Ok(())
        })?;
        Ok(Neighbour { over, thread })
    }

    /// Ends it.
    ///
    /// # Errors
    /// Why it could not be started.
    pub fn end(self) -> Result<()> {
        self.over.store(true, Ordering::SeqCst);
        self.thread.join().map_err(|_| anyhow::anyhow!("the neighbour's thread panicked"))?
    }
}

/// Lets a neighbour run until it ends, or is to end.
fn live(mut child: Child, over: &AtomicBool) -> Result<()> {
    use std::io::Write;
    if let Some(input) = &mut child.stdin {
        // Hostile programs don't read it, and may have ended.
        let _ended = writeln!(input, "{LONG}");
    }
    while child.try_wait()?.is_none() {
        if over.load(Ordering::SeqCst) {
            // It may have ended by itself.
            let _ended = child.kill();
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_what_a_figure_got_worse_by_whichever_way_is_worse() {
        assert_eq!(loss(200.0, 190.0, Better::Higher), 5.0);
        assert_eq!(loss(200.0, 210.0, Better::Lower), 5.0);
        assert_eq!(loss(200.0, 220.0, Better::Higher), -10.0);
    }

    #[test]
    fn every_neighbour_has_a_turn_and_the_order_is_turned_round() {
        let (there, mut back) = (order(0), order(1));
        back.reverse();
        assert_eq!((there.len(), there), (1 + HOSTILE.len(), back));
    }
}
