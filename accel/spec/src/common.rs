// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Records that every API has. Their ids are below those of any function.

use crate::wire::{Decoder, Encoder, Malformed, Record};

macro_rules! common {
    ($($(#[$doc:meta])* $name:ident = $id:literal lazy $lazy:literal { $($(#[$fdoc:meta])* $field:ident: $ty:ident),* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct $name { $($(#[$fdoc])* pub $field: $ty),* }
            impl Record<'_> for $name {
                const ID: u32 = $id;
                const LAZY: bool = $lazy;
                fn encode(&self, _to: &mut Encoder<'_>) { $(_to.$ty(self.$field);)* }
                fn decode(_from: &mut Decoder<'_>) -> Result<Self, Malformed> {
                    Ok($name { $($field: _from.$ty()?),* })
                }
            }
        )*
    };
}

common! {
    /// Does nothing; waits or is posted as the client likes.
    Ping = 1 lazy false {}
    /// Asks for the snapshot: root objects and their properties. The answer's form is the API's.
    Snapshot = 2 lazy false {}
    /// Gives up a handle that the client has no more use for.
    Release = 3 lazy true {
        /// The kind of the object, as the API numbers its kinds.
        kind: u32,
        /// The id that the client gave to the object.
        id: u64
    }
}
