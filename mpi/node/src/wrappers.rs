// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The socket to which the wrappers of ranks connect, in the first VM. Only its owner may write to it, who is root.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::Sender;
use std::thread;

use crate::frame::{self, Frame, Kind};
use crate::job::Event;
use crate::space;

/// Passes on what wrappers say.
///
/// # Errors
/// The socket can't be made.
pub fn listen(events: Sender<Event>) -> io::Result<()> {
    let listener = UnixListener::bind(space::SOCKET)?;
    thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let events = events.clone();
            thread::spawn(move || {
                let _ended = serve(socket, &events);
            });
        }
    });
    Ok(())
}

/// Passes on what one wrapper says, whose first frame names its rank.
fn serve(mut socket: UnixStream, events: &Sender<Event>) -> io::Result<()> {
    let Some(first) = frame::read(&mut socket)?.filter(|first| first.kind == Kind::Start) else {
        return Ok(());
    };
    let rank = first.id;
    let tell = |event| events.send(event).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe));
    tell(Event::Wrapper(rank, socket.try_clone()?))?;
    tell(Event::FromWrapper(first))?;
    loop {
        match frame::read(&mut socket) {
            Ok(Some(frame)) => tell(Event::FromWrapper(Frame { id: rank, ..frame }))?,
            Ok(None) | Err(_) => return tell(Event::WrapperGone(rank)),
        }
    }
}
