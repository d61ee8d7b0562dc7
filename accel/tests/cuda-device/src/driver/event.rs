// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events: the end of what a stream had when they were recorded.

use super::graph::Capture;
use super::registry::Registry;
use super::stream::{Done, resolve};
use super::work::Work;
use super::{Handle, INVALID_HANDLE, INVALID_VALUE, NOT_READY, Result, lock};
use std::sync::{Arc, Mutex};

pub struct Event {
    timing: bool,
    done: Mutex<Option<Arc<Done>>>,
    /// Recorded in a capture: the nodes that it stands for.
    pub captured: Mutex<Option<(Arc<Capture>, Vec<usize>)>>,
}

pub static EVENTS: Registry<Event> = Registry::new(INVALID_HANDLE);

pub fn create(flags: u32) -> Result<Handle> {
    super::context::current()?;
    Ok(EVENTS.insert(Arc::new(Event {
        timing: flags & 2 == 0,
        done: Mutex::default(),
        captured: Mutex::default(),
    })))
}

pub fn record(handle: Handle, stream: Handle) -> Result {
    let event = EVENTS.get(handle)?;
    let (context, stream) = resolve(stream)?;
    if let Some(capture) = lock(&stream.capture).clone() {
        *lock(&event.captured) = Some((capture.clone(), capture.ends(&stream)));
        return Ok(());
    }
    *lock(&event.captured) = None;
    *lock(&event.done) = Some(stream.queue(&context, Vec::new(), || Ok(()))?);
    Ok(())
}

pub fn wait(stream: Handle, handle: Handle) -> Result {
    let event = EVENTS.get(handle)?;
    let (context, stream) = resolve(stream)?;
    if let Some((capture, nodes)) = lock(&event.captured).clone() {
        return capture.join(&stream, &nodes);
    }
    if lock(&stream.capture).is_some() {
        return stream.submit(&context, Work::Nothing);
    }
    let done = lock(&event.done).clone();
    match done {
        Some(done) if done.when().is_none() => stream.queue(&context, vec![done], || Ok(())).map(drop),
        _ => Ok(()),
    }
}

pub fn synchronize(handle: Handle) -> Result {
    let event = EVENTS.get(handle)?;
    let done = lock(&event.done).clone();
    if let Some(done) = done {
        done.wait();
    }
    super::launch::flush();
    super::context::current()?.healthy()
}

pub fn query(handle: Handle) -> Result {
    let event = EVENTS.get(handle)?;
    super::context::current()?.healthy()?;
    let pending = lock(&event.done).as_ref().is_some_and(|done| done.when().is_none());
    if pending { Err(NOT_READY) } else { Ok(()) }
}

/// Milliseconds between two events.
pub fn elapsed(start: Handle, end: Handle) -> Result<f32> {
    let (start, end) = (EVENTS.get(start)?, EVENTS.get(end)?);
    if !start.timing || !end.timing {
        return Err(INVALID_HANDLE);
    }
    let when = |event: &super::event::Event| match lock(&event.done).as_ref() {
        Some(done) => done.when().ok_or(NOT_READY),
        None => Err(INVALID_VALUE),
    };
    let (start, end) = (when(&start)?, when(&end)?);
    let sign = if end >= start { 1.0 } else { -1.0 };
    Ok(sign * (end.max(start) - start.min(end)).as_secs_f32() * 1000.0)
}
