#!lua flags=allow-oom
--[[ Stores the response and ends the lease.
     One script, because only the last holder may write, and only while nobody has taken over.
     It may exceed maxmemory: the effect has happened, and losing its answer helps nobody.
     What comes first is what nearly every completion needs, in as few strings and calls as it takes.

  KEYS[1]  record     (string; the layout stands in src/record/codec.rs)
  ARGV[1]  owner      (68 bytes: recipe id and digest 36, holder 16, attempt 4, fence 6, created 6, as in the record)
  ARGV[2]  retention  (milliseconds)
  ARGV[3]  accepted   (up to 3 times 36 bytes: recipe id and digest by older recipes)
  ARGV[4]  response   (bytes, opaque, at least one)
  Returns  1 stored
         | 2 healed
         | 3 restored
         | 4 superseded, response
         | 5 mismatch
         | 6 lost
         | 7 unreadable
]]
local time = redis.call('TIME')
local key, owner, retention, response = KEYS[1], ARGV[1], ARGV[2], ARGV[4]

local sub, byte = string.sub, string.byte
local micros = time[2] + 0
local now = time[1] * 1000 + (micros - micros % 1000) / 1000
-- A checkpoint is for a later attempt, and there will be none: its length is 0 from here on.
local ended = struct.pack('>I6I4I4', now, #response, 0)

local record = redis.call('GET', key)
if not record then
  redis.call('SET', key, '\1\4' .. owner .. ended .. response, 'PX', retention)
  return {3}
end

local version, state = byte(record, 1, 2)
-- In flight, ours as it was granted, and without a checkpoint.
if #record == 84 and version == 1 and (state == 1 or state == 5) and sub(record, 3, 70) == owner then
  local a, b, c, d = byte(record, 81, 84)
  if a + b + c + d == 0 then
    redis.call('SET', key, '\1\4' .. owner .. ended .. response, 'PX', retention)
    return {1}
  end
end

if version ~= 1 or #record < 84 then return {7} end
local length, noted = struct.unpack('>I4I4', record, 77)
local answer = #record - 84 - noted
if state < 1 or state > 5 or answer ~= (state == 4 and math.max(length, 1) or 0) then return {7} end

local mine = sub(record, 39, 54) == sub(owner, 37, 52)
if state == 4 then
  local stored = sub(record, 85 + noted)
  if mine then
    if stored == response then
      -- Written again: a WAIT that follows waits for writes of its own connection only.
      redis.call('SET', key, record, 'KEEPTTL')
      return {1}
    end
    return {6}
  end
  local recipe, prints = sub(record, 3, 6), sub(owner, 1, 36) .. ARGV[3]
  for i = 1, #prints, 36 do
    if sub(prints, i, i + 3) == recipe then
      if sub(prints, i + 4, i + 35) == sub(record, 7, 38) then return {4, stored} end
      break
    end
  end
  return {5}
end

if not mine or state == 2 then return {6} end
redis.call('SET', key, '\1\4' .. sub(record, 3, 70) .. ended .. response, 'PX', retention)
if state == 3 then return {2} end
return {1}
